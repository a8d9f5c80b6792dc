"""The outer optimizer: torch's arithmetic without a transform, recorded trajectories with one, groups by role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from isoloco import IsoLoCo, OuterOptimizer, rules
from isoloco.outer import outer_groups
from isoloco.roles import roles, transposed
from outer_steps import SHAPES, anchors, assert_equal, give, relative, run

GOLDEN = Path(__file__).parent / "data" / "golden"
TRAJECTORIES = json.loads((GOLDEN / "rules.json").read_text())["trajectories"]


# torch's arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torch_sgd_bit_for_bit(momentum: float, nesterov: bool, decay: float, dtype: torch.dtype) -> None:
    ours = [p.to(dtype) for p in anchors()]
    theirs = [p.clone().requires_grad_() for p in ours]
    options: dict[str, Any] = {"lr": 0.7, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    run(OuterOptimizer(ours, **options), range(5))
    run(torch.optim.SGD(theirs, **options), range(5))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"betas": (0.8, 0.95), "eps": 1e-6}])
def test_adamw_is_torch_adamw_bit_for_bit(decay: float, options: dict[str, Any]) -> None:
    ours, theirs = anchors(), [p.requires_grad_() for p in anchors()]
    run(OuterOptimizer(ours, lr=0.1, optimizer="adamw", weight_decay=decay, **options), range(5))
    run(torch.optim.AdamW(theirs, lr=0.1, weight_decay=decay, **options), range(5))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"transform": "iso_c"}, {"transform": "iso_c", "at": "update"}])
@pytest.mark.parametrize("kind", ["plain", "heavy ball", "nesterov", "adamw"])
def test_the_delta_is_left_as_it_was_and_zero_deltas_move_nothing(kind: str, options: dict[str, Any]) -> None:
    options = {
        **options,
        **{
            "plain": {},
            "heavy ball": {"momentum": 0.9},
            "nesterov": {"momentum": 0.9, "nesterov": True},
            "adamw": {"optimizer": "adamw"},
        }[kind],
    }
    still, moved = anchors(), anchors()
    optimizer = OuterOptimizer(still, lr=1.8, **options)
    for _ in range(3):
        for p in still:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_equal(still, anchors())
    optimizer = OuterOptimizer(moved, lr=1.8, **options)
    for round in range(2):
        give(moved, round)
        before = [p.grad.clone() for p in moved if p.grad is not None]
        optimizer.step()
        assert_equal([p.grad for p in moved if p.grad is not None], before)


# the transform


@pytest.mark.parametrize("case", TRAJECTORIES, ids=lambda case: case["name"])
def test_golden_trajectories(case: dict[str, Any]) -> None:
    tensors = load_file(GOLDEN / "rules.safetensors")
    start, deltas, expected = (tensors[f"traj/{case['name']}/{part}"] for part in ("start", "deltas", "anchors"))
    anchor = start.clone()
    optimizer = OuterOptimizer(
        [anchor],
        lr=case["lr"],
        momentum=case.get("momentum", 0.0),
        nesterov=case.get("nesterov", False),
        transform="iso_c",
        transform_options={"polar": "svd"},
        at=case.get("orthogonalize_object", "gradient"),
    )
    for deltas_WMN, expected_MN in zip(deltas, expected, strict=True):
        anchor.grad = deltas_WMN.mean(0)
        optimizer.step()
        assert optimizer.transformed == 1
        assert relative(anchor - start, expected_MN - start) < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("at", ["gradient", "update"])
@pytest.mark.parametrize("transform", ["iso_c", "clip_high", "clip_low"])
def test_the_transform_acts_before_momentum_or_after_it(transform: str, at: Any, nesterov: bool) -> None:
    u = rules.bind_transform(transform)
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    anchor, expected, buffer = start.clone(), start.clone(), torch.zeros(6, 4)
    options: dict[str, Any] = {"momentum": 0.8, "nesterov": nesterov, "transform": transform, "at": at}
    optimizer = OuterOptimizer([anchor], lr=1.8, **options)
    for round in range(4):
        give([anchor], round)
        assert anchor.grad is not None
        delta = u(anchor.grad) if at == "gradient" else anchor.grad
        buffer = 0.8 * buffer + delta
        update = delta + 0.8 * buffer if nesterov else buffer
        expected = expected - 1.8 * (u(update) if at == "update" else update)
        optimizer.step()
    assert relative(anchor, expected) < 1e-5


@pytest.mark.parametrize("at", ["gradient", "update"])
def test_adamw_takes_a_transform_too(at: Any) -> None:
    u = rules.bind_transform("iso_c")
    anchor = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    expected, mean, square = anchor.clone(), torch.zeros(6, 4), torch.zeros(6, 4)
    optimizer = OuterOptimizer([anchor], lr=0.1, optimizer="adamw", transform="iso_c", at=at, weight_decay=0.2)
    for round in range(4):
        give([anchor], round)
        assert anchor.grad is not None
        delta = u(anchor.grad) if at == "gradient" else anchor.grad
        mean, square = 0.9 * mean + 0.1 * delta, 0.999 * square + 0.001 * delta**2
        update = (mean / (1 - 0.9 ** (round + 1))) / ((square / (1 - 0.999 ** (round + 1))).sqrt() + 1e-8)
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * (u(update) if at == "update" else update)
        optimizer.step()
    assert relative(anchor, expected) < 1e-5


def test_only_matrices_are_transformed_and_they_are_counted() -> None:
    ours, plain = anchors(), anchors()
    optimizer = IsoLoCo(ours, lr=1.0)
    run(optimizer, range(3))
    run(torch.optim.SGD([p.requires_grad_() for p in plain], lr=1.0, momentum=0.8, nesterov=True), range(3))
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b) == (a.ndim != 2)
    assert optimizer.transformed == 2
    assert optimizer.passed_through == ["parameter 4"]


def test_stacks_of_experts_are_transformed_one_by_one_on_demand() -> None:
    stack = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    together, apart = stack.clone(), [expert.clone() for expert in stack]
    optimizer = IsoLoCo([("experts", together)], batched=True)
    singles = IsoLoCo(apart)
    for round in range(3):
        give([together], round)
        assert together.grad is not None
        for expert, delta in zip(apart, together.grad, strict=True):
            expert.grad = delta.clone()
        optimizer.step()
        singles.step()
    assert relative(together, torch.stack(apart)) < 1e-5
    assert (optimizer.transformed, optimizer.passed_through) == (3, [])
    vectors = torch.zeros(4)
    both = IsoLoCo([("experts", together), ("norm", vectors), ("w", torch.zeros(2, 2))])
    assert both.passed_through == ["experts"]


def test_a_transform_that_nothing_is_eligible_for_is_an_error_and_nothing_moves() -> None:
    vectors = [torch.ones(3), torch.ones(2, 3, 4), torch.ones(0, 4)]
    optimizer = IsoLoCo(vectors)
    optimizer.step()  # no delta at all: nothing to do, as in torch
    give(vectors, 0)
    with pytest.raises(ValueError, match="transform iso_c needs matrices and no delta is one: pass 2-D parameters"):
        optimizer.step()
    assert_equal(vectors, [torch.ones(3), torch.ones(2, 3, 4), torch.ones(0, 4)])
    assert not optimizer.state


def test_frozen_matrices_are_no_reason_for_a_transform() -> None:
    net = nn.Linear(3, 2)
    optimizer = IsoLoCo(net.parameters())
    net.bias.grad = torch.ones(2)
    with pytest.raises(ValueError, match="needs matrices and no delta is one"):
        optimizer.step()


def same(delta_S: Tensor) -> Tensor:
    return delta_S


def flat(delta_S: Tensor) -> Tensor:
    return delta_S.view(-1).view_as(delta_S)


def test_a_transform_of_ones_own_sees_every_shape() -> None:
    ours, plain = anchors(), anchors()
    optimizer = OuterOptimizer(ours, lr=1.0, momentum=0.5, transform="outer_steps:half")
    run(optimizer, range(2))
    run(torch.optim.SGD([p.requires_grad_() for p in plain], lr=0.5, momentum=0.5), range(2))
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert (optimizer.transformed, optimizer.passed_through) == (len(SHAPES), [])


@pytest.mark.parametrize("name", ["same", "flat"])
@pytest.mark.parametrize("at", ["gradient", "update"])
def test_a_transform_that_returns_its_input_or_a_view_of_it_is_safe(name: str, at: Any) -> None:
    ours, plain = anchors(), anchors()
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    optimizer = OuterOptimizer(ours, transform=f"{__name__}:{name}", at=at, **options)
    give(ours, 0)
    before = [p.grad.clone() for p in ours if p.grad is not None]
    optimizer.step()
    assert_equal([p.grad for p in ours if p.grad is not None], before)
    run(optimizer, range(1, 4))
    run(torch.optim.SGD([p.requires_grad_() for p in plain], **options), range(4))
    assert_equal(ours, plain)


# groups


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.kernel = nn.Conv1d(4, 4, 3)
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))


def groups_of(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    named = dict(model.named_parameters())
    groups = outer_groups(named, roles=roles(model), transposed=transposed(model), **options)

    def title(group: dict[str, Any]) -> str:
        return " ".join([group["transform"], *(f"{k}={v}" for k, v in group["transform_options"].items())])

    return {title(group): [name for name, _ in group["params"]] for group in groups}


def test_groups_by_role() -> None:
    rest = ["hidden.bias", "kernel.weight", "kernel.bias"]
    assert groups_of(Net()) == {"none": ["experts", "table.weight", "hidden.weight", *rest]}
    assert groups_of(Net(), transform="iso_c", transform_options={"batched": True}) == {
        "iso_c batched=True": ["experts", "table.weight", "hidden.weight"],
        "none": rest,
    }
    assert groups_of(Net(), transform="clip_high", exclude=["embedding", "exp*"]) == {
        "clip_high": ["hidden.weight"],
        "none": ["experts", "table.weight", *rest],
    }
    everything = ["experts", "table.weight", "hidden.weight", *rest]
    assert groups_of(Net(), transform="outer_steps:half") == {"outer_steps:half": everything}
    named = dict(Net().named_parameters())
    optimizer = OuterOptimizer(outer_groups(named, roles=roles(Net()), transform="iso_c"), lr=1.0)
    assert optimizer.passed_through == ["experts", "kernel.weight"]


def test_exclusions_are_read_over_the_whole_model_for_a_part_of_it() -> None:
    net = Net()
    part = {"hidden.weight": net.hidden.weight.data}
    (group,) = outer_groups(part, roles=roles(net), exclude=["embedding"], transform="iso_c")
    assert (group["transform"], group["params"]) == ("iso_c", list(part.items()))
    bias = {"hidden.bias": net.hidden.bias.data}
    optimizer = OuterOptimizer(outer_groups(bias, roles=roles(net), transform="iso_c"), lr=1.0)
    give(list(bias.values()), 0)
    optimizer.step()  # what one process owns may hold no matrix
    assert optimizer.transformed == 0


def test_excluding_everything_or_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="'hiden' matches no parameter"):
        groups_of(Net(), transform="iso_c", exclude=["hiden"])
    with pytest.raises(ValueError, match="transform iso_c has no parameter left: exclude takes matrix, embedding"):
        groups_of(Net(), transform="iso_c", exclude=["matrix", "embedding"])


def test_spectral_scale_knows_how_gpt2_stores_its_weights() -> None:
    """One delta, stored [in, out] as GPT-2 does and [out, in] as a Linear does: the same step, sqrt(out / in) U V^T."""
    from transformers.pytorch_utils import Conv1D

    stored, usual = nn.ModuleDict({"w": Conv1D(12, 3)}), nn.ModuleDict({"w": nn.Linear(3, 12)})
    delta_OI = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    steps = []
    for model in (stored, usual):
        named = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        assert transposed(model) == ({"w.weight"} if model is stored else set())
        optimizer = OuterOptimizer(
            outer_groups(
                named,
                roles=roles(model),
                transposed=transposed(model),
                transform="iso_c",
                transform_options={"scale": "spectral", "polar": "svd"},
            ),
            lr=1.0,
        )
        named["w.weight"].grad = delta_OI.T.contiguous() if model is stored else delta_OI
        optimizer.step()
        steps.append(named["w.weight"].T if model is stored else named["w.weight"])
    u, _, vt = torch.linalg.svd(delta_OI, full_matrices=False)
    assert relative(steps[0], -2.0 * u @ vt) < 1e-5
    assert relative(steps[1], -2.0 * u @ vt) < 1e-5
