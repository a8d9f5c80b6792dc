"""What each rule documents of itself, and what is said to those who ask for something else."""

import math
import re

import pytest
import torch
from torch import Tensor

from isoloco import rules
from isoloco.rules.elementwise import _kth_largest


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def keys(count: int, round: int = 0) -> list[torch.Generator]:
    return [rules.generator(0, round, "weight", worker) for worker in range(count)]


# --- what the rules say of themselves -------------------------------------------------------------------------------


def test_mean_of_equal_workers_is_their_delta_and_encoding_it_copies_nothing():
    mean, x = rules.bind_reduce("mean"), drawn(6, 4, dtype=torch.float32)
    assert torch.equal(mean(x.expand(4, -1, -1)), x)
    coded = mean.encode(x)
    assert coded.shape == (1, 6, 4)
    assert coded.data_ptr() == x.data_ptr()


def test_stacked_call_leaves_deltas_alone_where_encode_is_a_view():
    x = drawn(3, 4, 5, dtype=torch.float32)
    before = x.clone()
    rules.bind_reduce("mean")(x)
    assert torch.equal(x, before)


def test_ties_of_equal_workers_is_the_trimmed_delta():
    x = drawn(6, 10)
    got = rules.bind_reduce("ties", {"density": 0.3})(x.expand(5, -1, -1))
    largest = x.abs() >= x.abs().flatten().sort(descending=True).values[17]
    torch.testing.assert_close(got, torch.where(largest, x, 0))


def test_ties_averages_those_that_agree_and_elects_zero_where_signs_balance():
    deltas = torch.tensor([[3.0, 1.0, 2.0, -1.0], [1.0, -1.0, -5.0, 1.0], [-1.0, 0.0, 1.0, 3.0]])
    got = rules.bind_reduce("ties", {"density": 1.0})(deltas)
    assert got.tolist() == [2.0, 0.0, -5.0, 2.0]


def test_ties_keeps_everything_that_ties_with_the_last_one_kept():
    x = torch.tensor([1.0, -2.0, 2.0, 2.0, -1.0, 0.5])
    ties = rules.bind_reduce("ties", {"density": 0.34})  # two of six
    assert ties(x[None]).tolist() == [0.0, -2.0, 2.0, 2.0, 0.0, 0.0]
    assert ties(x.flip(0)[None]).tolist() == ties(x[None]).flip(0).tolist()


@pytest.mark.parametrize(("by", "kept"), [("row", ([1, 3], slice(None))), ("column", (slice(None), [0, 2]))])
def test_ties_by_row_and_column_keeps_whole_ones(by, kept):
    x = drawn(4, 4)
    x[kept] *= 100
    got = rules.bind_reduce("ties", {"density": 0.5, "by": by})(x[None])
    expected = torch.zeros_like(x)
    expected[kept] = x[kept]
    torch.testing.assert_close(got, expected)


def test_sparsify_elect_and_rescale_compose():
    x = drawn(1, 20, 30)
    trimmed = rules.bind_reduce("ties", {"density": 0.4, "elect": False})(x)
    torch.testing.assert_close(rules.bind_reduce("ties", {"density": 0.4})(x), trimmed)
    torch.testing.assert_close(rules.bind_reduce("ties", {"density": 0.4, "rescale": True})(x), trimmed / 0.4)
    dropped = rules.bind_reduce("dare", {"density": 0.4, "rescale": False})(x, generators=keys(1))
    torch.testing.assert_close(rules.bind_reduce("dare", {"density": 0.4})(x, generators=keys(1)), dropped / 0.4)
    torch.testing.assert_close(
        rules.bind_reduce("dare", {"density": 0.4, "elect": True})(x, generators=keys(1)), dropped / 0.4
    )
    assert rules.bind_reduce("dare", {"elect": True}).channels == rules.bind_reduce("ties").channels == 4
    assert rules.bind_reduce("dare").channels == rules.bind_reduce("ties", {"elect": False}).channels == 1


@pytest.mark.parametrize("name", ["mean", "ties", "dare"])
def test_leading_channels_add_up_to_the_coded_delta(name):
    rule, x = rules.bind_reduce(name), drawn(1, 8, 9)
    coded = rule.encode(x[0], weight=0.7, generator=keys(1)[0])
    torch.testing.assert_close(coded[: rule.summed].sum(0), 0.7 * rule(x, generators=keys(1)))


@pytest.mark.parametrize("density", [0.001, 0.3, 0.9, 0.999, 1.0])
def test_selection_equals_sorting(density):
    x = drawn(37, 53, dtype=torch.float32).abs()
    kept = max(1, int(density * x.numel()))
    assert float(_kth_largest(x, kept)) == float(x.flatten().sort(descending=True).values[kept - 1])
    assert float(x.flatten().kthvalue(x.numel() - kept + 1).values) == float(_kth_largest(x, kept))


def test_dare_drops_the_stated_part_and_keeps_the_expectation():
    ones = torch.ones(1, 400, 500)
    got = rules.bind_reduce("dare", {"density": 0.3})(ones, generators=keys(1))
    assert set(got.unique().tolist()) == {0.0, torch.tensor(1.0).div(0.3).item()}
    assert float(got.mean()) == pytest.approx(1.0, abs=0.02)
    assert rules.bind_reduce("dare", {"density": 1.0})(ones, generators=keys(1)).unique().tolist() == [1.0]


def test_dare_by_row_drops_whole_rows():
    got = rules.bind_reduce("dare", {"density": 0.5, "by": "row"})(torch.ones(1, 40, 7), generators=keys(1))
    assert bool((got == got[:, :1]).all())
    assert 5 < int((got[:, 0] > 0).sum()) < 35


def test_no_two_workers_rounds_or_parameters_share_a_mask():
    dare = rules.bind_reduce("dare", {"density": 0.5})
    masks = {
        tuple(dare.encode(torch.ones(64), generator=rules.generator(seed, round, name, worker)).flatten().tolist())
        for seed in range(2)
        for round in range(6)
        for name in ("a", "b")
        for worker in range(6)
    }
    assert len(masks) == 2 * 6 * 2 * 6


def test_dare_without_generators_is_an_error():
    with pytest.raises(ValueError, match="one for each worker"):
        rules.bind_reduce("dare")(torch.ones(2, 3))
    with pytest.raises(ValueError, match="generator"):
        rules.bind_reduce("dare").encode(torch.ones(3))


def test_tsv_returns_one_workers_delta_and_truncates_equal_ones():
    x = drawn(8, 12)
    one = rules.bind_reduce("tsv", {"rank_fraction": 0.25})(x[None])
    assert torch.equal(one, x)
    assert one.data_ptr() != x.data_ptr()
    left, sigma, right = torch.linalg.svd(x, full_matrices=False)
    truncated = left[:, :2] * sigma[:2] @ right[:2]
    torch.testing.assert_close(rules.bind_reduce("tsv")(x.expand(4, -1, -1)), truncated)


def test_tsv_decorrelates_the_workers_vectors():
    """The leading vectors of two workers end as orthonormal, with each worker's singular values on them."""
    x = drawn(2, 10, 16)
    sigma = torch.linalg.svdvals(x)[:, :5].flatten().sort(descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(rules.bind_reduce("tsv")(x)), sigma)


def test_iso_cts_is_iso_c_where_nothing_can_be_shared_out():
    x = drawn(5, 4, 9)
    iso_c = rules.bind_transform("iso_c")
    torch.testing.assert_close(rules.bind_reduce("iso_cts")(x), iso_c(x.mean(0)))
    all_common = rules.bind_reduce("iso_cts", {"common_fraction": 1.0})
    torch.testing.assert_close(all_common(x[:2]), iso_c(x[:2].mean(0)))


@pytest.mark.parametrize(("workers", "shape", "fraction"), [(4, (11, 30), 0.0), (2, (3, 3), 0.25), (7, (5, 2), 0.1)])
def test_iso_cts_is_isotropic_for_every_shape(workers, shape, fraction):
    """Shapes on which rounding the shares past the matrix would fail."""
    got = rules.bind_reduce("iso_cts", {"common_fraction": fraction})(drawn(workers, *shape))
    sigma = torch.linalg.svdvals(got)
    torch.testing.assert_close(sigma, sigma[:1].expand_as(sigma))


def test_iso_c_flattens_the_spectrum_at_its_mean():
    x = drawn(7, 12)
    sigma = torch.linalg.svdvals(x)
    for scale, size in {"mean": sigma.mean(), "rms": sigma.square().mean().sqrt()}.items():
        flat = torch.linalg.svdvals(rules.bind_transform("iso_c", {"scale": scale})(x))
        torch.testing.assert_close(flat, size.expand(7))


def test_spectral_scale_follows_the_stored_orientation():
    x = drawn(6, 24)  # [out, in]: sqrt(6 / 24); [in, out]: sqrt(24 / 6)
    for transposed, size in {False: 0.5, True: 2.0}.items():
        transform = rules.bind_transform("iso_c", {"scale": "spectral", "transposed": transposed})
        assert transform.degree == 0
        assert torch.linalg.svdvals(transform(x)).tolist() == pytest.approx([size] * 6)


def test_clips_bound_the_spectrum_from_one_side():
    x = drawn(7, 12)
    sigma = torch.linalg.svdvals(x)
    high = torch.linalg.svdvals(rules.bind_transform("clip_high")(x))
    low = torch.linalg.svdvals(rules.bind_transform("clip_low")(x))
    torch.testing.assert_close(high, sigma.clamp(max=float(sigma.mean())))
    torch.testing.assert_close(low, sigma.clamp(min=float(sigma.mean())))


@pytest.mark.parametrize("name", ["iso_c", "clip_high", "clip_low"])
def test_batched_is_matrix_by_matrix_and_off_unless_asked(name):
    x = drawn(3, 4, 6)
    one = rules.bind_transform(name)
    torch.testing.assert_close(rules.bind_transform(name, {"batched": True})(x), torch.stack([one(m) for m in x]))
    assert one(x) is x


@pytest.mark.parametrize("name", ["iso_c", "clip_high", "clip_low"])
def test_what_is_no_matrix_passes_and_null_directions_stay_null(name):
    transform = rules.bind_transform(name)
    for x in (torch.tensor(2.0), torch.ones(3), torch.ones(0, 4), torch.ones(2, 2, 2)):
        assert transform(x) is x
    rank_1 = torch.outer(drawn(5, seed=1), drawn(8, seed=2))
    assert int(torch.linalg.matrix_rank(transform(rank_1))) == 1
    assert not transform(torch.zeros(3, 4)).any()


def test_rank_tolerance_zero_is_the_plain_formula():
    """Every direction counts, noise too: all singular values are the mean."""
    x = torch.outer(drawn(5, seed=1), drawn(8, seed=2)) + 1e-9 * drawn(5, 8)
    flat = torch.linalg.svdvals(rules.bind_transform("iso_c", {"rank_tolerance": 0.0, "polar": "svd"})(x))
    torch.testing.assert_close(flat, torch.linalg.svdvals(x).mean().expand(5))


# --- binding, options, documentation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "name", "options", "message"),
    [
        (rules.bind_reduce, "tie", {}, "unknown reduce 'tie'; nearest: ties"),
        (rules.bind_transform, "iso", {}, "unknown transform 'iso'; nearest: iso_c"),
        (rules.bind_reduce, "iso_c", {}, "iso_c is a transform"),
        (rules.bind_transform, "ties", {}, "ties is a reduce"),
        (rules.bind_reduce, "no_such_package.x:f", {}, "cannot be imported"),
        (rules.bind_reduce, "math:no_such_function", {}, "cannot be imported"),
        (rules.bind_reduce, "mean", {"density": 1}, "mean takes no option 'density'; it takes no options"),
        (rules.bind_reduce, "ties", {"dense": 1}, "it takes density, by, elect, rescale"),
        (rules.bind_reduce, "ties", {"density": 0}, "density is 0, takes a number above 0 and at most 1"),
        (rules.bind_reduce, "ties", {"density": True}, "density is True"),
        (rules.bind_reduce, "dare", {"by": "diagonal"}, "by is 'diagonal', takes element, row or column"),
        (rules.bind_reduce, "tsv", {"rank_fraction": 1.5}, "takes a number above 0 and at most 1 or nothing"),
        (rules.bind_reduce, "iso_cts", {"common_fraction": -1}, "takes a number between 0 and 1"),
        (rules.bind_reduce, "tsv", {"decorrelate": "no"}, "takes true or false"),
        (rules.bind_transform, "iso_c", {"scale": "max"}, "takes mean, rms or spectral"),
        (rules.bind_transform, "iso_c", {"polar": "qr"}, "'qr' is not known"),
        (rules.bind_transform, "iso_c", {"polar": 3}, "polar is 3, takes text"),
        (rules.bind_transform, "iso_c", {"polar": "newton_schulz", "rank_tolerance": 0.1}, "no rank tolerance"),
        (rules.bind_transform, "clip_high", {"scale": "mean"}, "it takes batched"),
    ],
)
def test_mistakes_are_one_line(bind, name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        bind(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, math.inf, 1.0]])
@pytest.mark.parametrize("name", ["mean", "tsv"])
def test_weights_that_cannot_weigh_are_refused(name, weights):
    with pytest.raises(ValueError, match="weights"):
        rules.bind_reduce(name)(torch.ones(3, 2, 2), weights)


def test_no_worker_and_no_floats_are_refused():
    with pytest.raises(ValueError, match="one worker or more"):
        rules.bind_reduce("mean")(torch.ones(0, 2, 2))
    for call in (rules.bind_reduce("mean"), rules.bind_reduce("tsv"), rules.bind_transform("iso_c")):
        with pytest.raises(ValueError, match="floating-point"):
            call(torch.ones(2, 2, 2, dtype=torch.int64)[: 2 if call.name != "iso_c" else 1].squeeze())


def test_bound_rules_hold_all_their_options():
    assert rules.bind_reduce("ties", {"density": 0.5}).options == {
        "density": 0.5, "by": "element", "elect": True, "rescale": False,
    }  # fmt: skip
    assert rules.bind_transform("iso_c").options["polar"] == "auto"
    facts = {name: (rule.scale, rule.additive, rule.needs_matrix, rule.random, rule.channels, rule.summed)
             for name in rules.OWN if name in rules.REDUCES and (rule := rules.bind_reduce(name))}  # fmt: skip
    assert facts == {
        "mean": ("mean", True, False, False, 1, 1),
        "ties": ("mean", True, False, False, 4, 2),
        "dare": ("mean", True, False, True, 1, 1),
        "tsv": ("sum", False, True, False, 1, 1),
        "iso_cts": ("mean", False, True, False, 1, 1),
    }


@pytest.mark.parametrize("name", sorted(rules.OWN))
def test_every_rule_describes_itself(name):
    said = rules.describe(name)
    assert list(said) == ["name", "kind", "summary", "equation", "scale", "cost", "bytes", "source", "options"]
    assert all(said[key] for key in said if key != "options")
    assert said["source"] == (rules.bind(name)).source
    assert list(said["options"]) == list(rules.bind(name).options)
    assert "Section" in said["source"]


def test_describe_joins_the_lines_of_a_section():
    assert rules.describe("tsv")["equation"].endswith("mean(w) = 1")
    assert rules.describe("iso_cts")["options"] == {
        "common_fraction": {"default": 0.8, "takes": "a number between 0 and 1"}
    }
