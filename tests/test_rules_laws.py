"""Laws over the whole registry, and the way to a rule of one's own."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from isoloco import rules, seeds
from isoloco.testing import check_rule

VARIANTS = [
    ("ties", {"density": 0.3}),
    ("ties", {"density": 0.3, "by": "row"}),
    ("ties", {"density": 0.5, "by": "column", "rescale": True}),
    ("ties", {"density": 0.4, "elect": False, "rescale": True}),
    ("dare", {"density": 0.1, "elect": True}),
    ("dare", {"density": 0.3, "by": "row", "rescale": False}),
    ("dare", {"density": 0.5, "by": "column"}),
    ("tsv", {"rank_fraction": 0.5}),
    ("tsv", {"decorrelate": False}),
    ("iso_cts", {"common_fraction": 0.0}),
    ("iso_cts", {"common_fraction": 0.5}),
    ("iso_cts", {"common_fraction": 1.0}),
    *[("iso_c", {"polar": polar}) for polar in ("svd", "gram", "newton_schulz", "polar_express")],
    ("iso_c", {"batched": True}),
    ("iso_c", {"scale": "rms"}),
    ("iso_c", {"scale": "spectral", "transposed": True}),
    ("clip_high", {"batched": True}),
    ("clip_low", {"batched": True}),
]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- the laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*rules.REDUCES, *rules.TRANSFORMS])
def test_every_rule_keeps_the_laws(name):
    check_rule(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_every_option_keeps_the_laws(name, options):
    check_rule(name, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*rules.REDUCES, *rules.TRANSFORMS])
def test_every_rule_keeps_the_laws_on_a_gpu(name):
    check_rule(name, device="cuda")


def broken_transforms():
    def not_odd(delta_S):
        return delta_S.abs()

    def not_homogeneous(delta_S):
        return delta_S**3

    def another_shape(delta_S):
        return delta_S.flatten()

    def changes_its_input(delta_S):
        return delta_S.mul_(2)

    def reads_strides(delta_S):
        return delta_S * (1 + (delta_S.ndim > 1 and delta_S.stride(-1) == 1))

    def overflows(delta_S):
        return delta_S * (delta_S.square().sum() / delta_S.square().sum().clamp(min=1e-30))

    return {
        not_odd: "odd",
        not_homogeneous: "homogeneous of degree 1",
        another_shape: "keeps shape, dtype and device",
        changes_its_input: "leaves its input alone",
        reads_strides: "ignores strides",
        overflows: "finite for x 1e30",
    }


def broken_reduces():
    def first_worker(deltas_WS, weights_W):
        return deltas_WS[0]

    def absolute_weights(deltas_WS, weights_W):
        return torch.tensordot(weights_W, deltas_WS, 1)

    @rules.joint(scale="mean")
    def sum_called_mean(deltas_WS, weights_W):
        return torch.tensordot(weights_W / weights_W.mean(), deltas_WS, 1)

    @rules.joint(scale="sum")
    def mean_called_sum(deltas_WS, weights_W):
        return torch.tensordot(weights_W / weights_W.sum(), deltas_WS, 1)

    class NotLinear:
        def encode(self, delta_S, *, weight=1.0, generator=None):
            return weight**2 * delta_S[None]

        def decode(self, total_KS, total_weight):
            return total_KS[0] / total_weight**2

    class TwoChannels(NotLinear):
        def encode(self, delta_S, *, weight=1.0, generator=None):
            return weight * torch.stack([delta_S, delta_S])

        def decode(self, total_KS, total_weight):
            return total_KS[0] / total_weight

    class NeverDraws(rules.Additive):
        random = True

        def encode(self, delta_S, *, weight=1.0, generator=None):
            return weight * delta_S[None]

        def decode(self, total_KS, total_weight):
            return total_KS[0] / total_weight

    return {
        first_worker: "ignores the order of workers",
        absolute_weights: "equal weights are none",
        sum_called_mean: "mean-like",
        mean_called_sum: "sum-like",
        NotLinear: "equal weights are none|encode is linear in the weight",
        TwoChannels: r"encode gives \[K, \*S\]",
        NeverDraws: "another worker draws anew",
    }


@pytest.mark.parametrize(("rule", "law"), [*broken_transforms().items(), *broken_reduces().items()])
def test_check_rule_names_the_law_that_fails(rule, law):
    with pytest.raises(AssertionError, match=law) as caught:
        check_rule(rule)
    assert rule.__name__ in str(caught.value)


# --- rules of one's own ---------------------------------------------------------------------------------------------


def median(deltas_WS: Tensor, weights_W: Tensor) -> Tensor:
    """Median over the workers, the mean of the two middle ones where they are even in number."""
    return deltas_WS.quantile(0.5, dim=0) if deltas_WS.numel() else deltas_WS.sum(0)


def shrunk(delta_S: Tensor, *, factor: float = 0.5) -> Tensor:
    """The delta times a factor."""
    return factor * delta_S


class Halves:
    """A mean that sends two channels."""

    channels = 2

    def __init__(self, *, share: float = 0.5) -> None:
        self.share = share

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        return weight * torch.stack([self.share * delta_S, (1 - self.share) * delta_S])

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor:
        return total_KS.sum(0) / total_weight


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(rules, "REDUCES", dict(rules.REDUCES))
    monkeypatch.setattr(rules, "TRANSFORMS", dict(rules.TRANSFORMS))
    return rules.register


def test_a_registered_rule_gets_all_laws_by_one_line(registered):
    for name, rule in {"median": median, "shrunk": shrunk, "halves": Halves, "object": Halves(share=0.2)}.items():
        registered(name, rule)
        check_rule(name)


def test_registered_rules_are_bound_with_options(registered):
    registered("halves", Halves)
    registered("shrunk", shrunk)
    halves = rules.bind_reduce("halves", {"share": 0.1})
    assert (halves.additive, halves.channels, halves.summed, halves.scale) == (True, 2, 2, "mean")
    x = drawn(2, 3, 4)
    torch.testing.assert_close(halves(x, [1, 3]), (x[0] + 3 * x[1]) / 4)
    assert rules.bind_transform("shrunk", {"factor": 0.25})(torch.ones(2)).tolist() == [0.25, 0.25]
    with pytest.raises(ValueError, match="factor is 'much', takes a number"):
        rules.bind_transform("shrunk", {"factor": "much"})
    assert rules.describe("shrunk")["summary"] == "The delta times a factor."


def test_a_function_can_be_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_merging.py").write_text(
        "def largest(deltas_WS, weights_W, *, factor=1.0):\n    return factor * deltas_WS.sum(0) / len(deltas_WS)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = rules.bind_reduce("my_merging:largest", {"factor": 2.0})
    assert rule(torch.ones(3, 2, dtype=torch.bfloat16)).tolist() == [2.0, 2.0]
    check_rule("my_merging:largest", factor=2.0)
    with pytest.raises(ValueError, match="is a reduce"):
        rules.bind_transform("my_merging:largest")


def test_registering_what_is_no_rule_or_not_yours_is_an_error(registered):
    with pytest.raises(ValueError, match="another name"):
        registered("mean", median)
    with pytest.raises(ValueError, match="3 positional arguments"):
        registered("three", lambda a, b, c: a)
    for nothing in (3, dict):
        with pytest.raises(ValueError, match="is no rule"):
            registered("nothing", nothing)


def test_registering_a_name_again_replaces_it_even_by_another_kind(registered):
    registered("mine", median)
    registered("mine", shrunk)
    assert rules.bind_transform("mine").name == "mine"
    with pytest.raises(ValueError, match="is a transform"):
        rules.bind_reduce("mine")


# --- random numbers by name -----------------------------------------------------------------------------------------


def test_hashes_are_the_same_everywhere_and_tell_parts_apart():
    assert seeds.stable_hash(42, 0, "layers.0.weight", 3) == 8567880509559163401
    parts = [(1,), ("1",), (1.0,), (True,), (None,), (1, 2), (12,), ("1", "2"), ("12",), ("1, 2",), ()]
    assert len({seeds.stable_hash(*p) for p in parts}) == len(parts)
    assert all(0 <= seeds.stable_hash(*p) < 2**63 for p in parts)


def test_generators_depend_on_their_key_alone():
    first, second = rules.generator(1, 2, "w", 3), seeds.generator(1, 2, "w", 3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=second))
    assert not torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=rules.generator(1, 2, "w", 4)))


def test_seeds_import_no_torch():
    code = "import sys, isoloco.seeds; isoloco.seeds.stable_hash(1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
