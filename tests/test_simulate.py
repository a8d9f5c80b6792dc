"""simulate(): any module, any loss, any batches, workers of any number, rules of one's own."""

import ast
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoloco
import toy
from isoloco import rules
from isoloco.config import InnerConfig, OuterConfig, ReduceConfig, TransformConfig
from isoloco.presets import METHODS
from isoloco.simulate import simulate

EXAMPLE = Path(__file__).parent.parent / "examples" / "simulate.py"
SIZES: dict[str, Any] = {"workers": 2, "sync_every": 4, "rounds": 5}
INNER = InnerConfig(lr=toy.LR)


@pytest.fixture
def own_rules():
    """Rules that a test registers are forgotten afterwards."""
    kept = dict(rules.REDUCES), dict(rules.TRANSFORMS)
    yield
    for table, before in zip((rules.REDUCES, rules.TRANSFORMS), kept, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method):
    model = toy.Net()
    result = isoloco.simulate(model, toy.loss, toy.batch, method=method, inner=InnerConfig(lr=toy.LR), **SIZES)
    assert len(result.losses) == 5
    assert result.losses[-1] < 0.95 * result.losses[0]
    assert [m["step"] for m in result.rounds] == list(range(4, 21, 4))
    assert all(p.isfinite().all() for p in model.parameters())
    assert result.total_s > 0


def test_equal_calls_are_equal_whatever_was_drawn_before():
    def run() -> tuple[list[float], dict[str, Tensor]]:
        model = toy.Net(dropout=0.3)
        found = simulate(model, toy.loss, toy.batch, method="dare", inner=INNER, **SIZES)
        return found.losses, toy.copied(dict(model.named_parameters()))

    torch.manual_seed(1)
    first = run()
    torch.rand(5)
    toy.assert_same(run(), first)


def test_random_state_and_the_callers_options_are_left_alone():
    inner, outer = InnerConfig(lr=0.1), OuterConfig(lr=0.5)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    simulate(toy.Net(dropout=0.3), toy.loss, toy.batch, inner=inner, outer=outer, **SIZES)
    assert torch.equal(torch.rand(3), expected)
    assert inner == InnerConfig(lr=0.1)
    assert outer == OuterConfig(lr=0.5)


def test_it_evaluates_the_anchor_when_due_and_after_the_last_round():
    model = toy.Net()
    seen: list[int] = []
    result = simulate(
        model, toy.loss, toy.batch, inner=INNER, evaluate=lambda m: float(m.mix.weight.detach().sum()),
        evaluate_every=2, on_round=lambda metrics: seen.append(metrics["round"]), **SIZES,
    )  # fmt: skip
    assert seen == list(range(1, 6))
    assert [at for at, _ in result.evaluations] == [2, 4, 5]
    assert result.evaluations[-1][1] == float(model.mix.weight.detach().sum())


# parts of one's own


def middle(deltas_WS: Tensor, weights_W: Tensor, *, shrink: float = 1.0) -> Tensor:
    return shrink * deltas_WS.median(0).values


def halve(delta_S: Tensor) -> Tensor:
    return delta_S / 2


def test_a_reduce_and_a_transform_of_ones_own(own_rules):
    deltas: list[dict[str, Tensor]] = []
    models = [toy.Net(), toy.Net()]
    start = toy.copied(dict(models[0].named_parameters()))
    simulate(
        models[0], toy.loss, toy.batch, method="diloco_sgd", reduce=middle, transform=halve, inner=INNER,
        outer=OuterConfig(lr=1.0), workers=3, sync_every=4, rounds=1,
        observe=lambda phase, **info: deltas.append(toy.copied(info["deltas"])) if phase == "delta" else None,
    )  # fmt: skip
    assert len(deltas) == 3
    for name, p in models[0].named_parameters():
        expected = torch.stack([d[name] for d in deltas]).median(0).values / 2
        assert torch.equal(p.detach(), start[name] - expected), name
    assert rules.REDUCES["test_simulate:middle"] is middle

    name = f"{middle.__module__}:{middle.__qualname__}"  # the same by name, with an option
    simulate(
        models[1], toy.loss, toy.batch, method="diloco_sgd", reduce=ReduceConfig(name=name, options={"shrink": 0.5}),
        inner=INNER, outer=OuterConfig(lr=1.0), workers=3, sync_every=4, rounds=1,
    )  # fmt: skip
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7, msg=name)


def test_optimizers_of_ones_own_follow_the_schedule():
    rates: list[float] = []
    model = toy.Net()

    def two(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(params[:1], lr=0.5), torch.optim.Adam(params[1:], lr=0.01)]

    result = simulate(
        model, toy.loss, toy.batch, inner=two,
        observe=lambda phase, **info: rates.append(info["lr"]) if phase == "inner" and info["worker"] == 0 else None,
        **SIZES,
    )  # fmt: skip
    assert len(rates) == 20
    assert rates[0] == pytest.approx(0.05)
    assert rates[2] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.05)
    assert result.losses[-1] < result.losses[0]


def test_frozen_parameters_stay_and_are_not_exchanged():
    model = toy.Net()
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    names: set[str] = set()
    simulate(
        model, toy.loss, toy.batch, inner=INNER,
        observe=lambda phase, **info: names.update(info["deltas"]) if phase == "reduced" else None, **SIZES,
    )  # fmt: skip
    assert torch.equal(model.embedding.weight, before)
    assert names == {n for n, p in model.named_parameters() if p.requires_grad}


def test_convolutions_and_stacks_of_experts_train():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3)
            self.experts = nn.Parameter(torch.randn(2, 12, 4) / 4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x).flatten(1)
            return self.scale * torch.einsum("bi,eio->bo", h, self.experts)

    def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
        keyed = torch.Generator().manual_seed(100 * worker + step)
        x = torch.randn(8, 1, 4, 4, generator=keyed)
        return x, x[:, 0, 1:3, 1:3].flatten(1)

    for method in ("isoloco", "iso_cts", "ties"):
        torch.manual_seed(0)
        result = simulate(
            Model(), lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), batch, method=method, inner=InnerConfig(lr=2e-3),
            transform=TransformConfig(options={"batched": True}) if method == "isoloco" else None, **SIZES,
        )  # fmt: skip
        assert result.losses[-1] < result.losses[0]


# what is refused, before any step


class Running(toy.Net):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)


class Told(toy.Net):
    """A model with a buffer that a forward pass reads and leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids_B: Tensor) -> Tensor:
        return super().forward(ids_B) + self.shift.sum()


@pytest.mark.parametrize("method", ["isoloco", "dp"])
def test_buffers_that_a_forward_pass_changes_are_refused(method):
    read: list[tuple[int, int]] = []

    def batch(worker: int, step: int) -> list[toy.Batch]:
        read.append((worker, step))
        return [toy.batch(worker, step)] * 2

    model = Running()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"norm\.running_mean.*LayerNorm") as raised:
        simulate(model, toy.loss, batch, method=method, **SIZES)
    assert "\n" not in str(raised.value)
    assert read == [(0, 0)]
    toy.assert_same(dict(model.state_dict()), before)
    simulate(Told(), toy.loss, batch, method=method, inner=INNER, workers=2, sync_every=2, rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "isolocco"}, "unknown method 'isolocco'.*isoloco"),
        ({"reduce": "median"}, "unknown reduce 'median'"),
        ({"transform": TransformConfig(name="iso_c", options={"scales": "rms"})}, "scales"),
        ({"transform": TransformConfig(exclude=["norms"])}, "'norms' matches no parameter"),
        ({"workers": 0}, "workers: got 0"),
        ({"wire": "int4"}, "comm.wire: got 'int4'"),
        ({"method": "dp", "outer": OuterConfig(lr=0.7)}, "dp has no outer step"),
        ({"inner": lambda params: torch.optim.SGD(params[1:], lr=0.1)}, "exactly once.*embedding.weight"),
    ],
)
def test_mistakes_are_one_line_before_any_step(options, message):
    read: list[int] = []
    with pytest.raises(ValueError, match=message) as raised:
        simulate(toy.Net(), toy.loss, lambda worker, step: read.append(step), **{**SIZES, **options})
    assert "\n" not in str(raised.value)
    assert read == []


def test_a_model_without_parameters_is_refused():
    model = toy.Net().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        simulate(model, toy.loss, toy.batch, **SIZES)


# the example


def test_the_example_is_forty_lines():
    tree = ast.parse(EXAMPLE.read_text("utf-8"))
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef)]
    lines = {node.lineno + i for node in ast.walk(tree) if isinstance(node, ast.stmt)
             for i in range((node.end_lineno or node.lineno) - node.lineno + 1)}  # fmt: skip
    for node in documented:
        if ast.get_docstring(node):
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    text = EXAMPLE.read_text("utf-8").splitlines()
    assert len([n for n in lines if text[n - 1].strip()]) <= 40


@pytest.mark.slow
def test_the_example_runs_and_learns():
    found = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, check=True, timeout=300
    )
    accuracies = [float(line.split()[-1]) for line in found.stdout.splitlines()]
    assert len(accuracies) == 3
    assert min(accuracies) > 0.5  # of six classes
    assert found.stderr == ""
    assert not any(math.isnan(a) for a in accuracies)
