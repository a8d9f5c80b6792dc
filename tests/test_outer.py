"""The outer optimizer: torch's arithmetic without a transform, recorded trajectories with one, files and schedulers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isoloco import IsoLoCo, OuterOptimizer, rules
from isoloco.outer import outer_groups
from isoloco.roles import roles, transposed

GOLDEN = Path(__file__).parent / "data" / "golden"
TRAJECTORIES = json.loads((GOLDEN / "rules.json").read_text())["trajectories"]
SHAPES = [(7, 5), (4, 9), (6,), (1,), (3, 4, 2), ()]


def anchors(seed: int = 0) -> list[Tensor]:
    """Plain tensors, as the trainer's anchors are: nothing requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give(params: list[Tensor], round: int) -> None:
    """Set deltas that depend on the round alone."""
    generator = torch.Generator().manual_seed(1000 + round)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, rounds: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for round in rounds:
        give(params, round)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


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


def half(delta_S: Tensor) -> Tensor:
    return delta_S / 2


def same(delta_S: Tensor) -> Tensor:
    return delta_S


def flat(delta_S: Tensor) -> Tensor:
    return delta_S.view(-1).view_as(delta_S)


def test_a_transform_of_ones_own_sees_every_shape() -> None:
    ours, plain = anchors(), anchors()
    optimizer = OuterOptimizer(ours, lr=1.0, momentum=0.5, transform=f"{__name__}:half")
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


# a true optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_state_through_files_continues_bit_for_bit(form: str, optimizer: Any, tmp_path: Path) -> None:
    momentum: dict[str, Any] = {"momentum": 0.8, "nesterov": True} if optimizer == "sgd" else {}

    def build(params: list[Tensor], lr: float = 1.8) -> OuterOptimizer:
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        polar = {"polar": {"square": "gram", "wide": "svd"}}
        groups = [
            {"params": named[:1], "transform": "iso_c", "transform_options": polar},
            {"params": named[1:], "lr": 0.5},
        ]
        return OuterOptimizer(groups, lr=lr, optimizer=optimizer, **momentum)

    straight, broken = anchors(), anchors()
    run(build(straight), range(6))
    before = build(broken)
    run(before, range(3))
    state = before.state_dict()
    if form == "torch":
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    else:
        flat = {f"{i}/{key}": t for i, entry in state["state"].items() for key, t in entry.items()}
        save_file(flat, tmp_path / "state.safetensors")
        (tmp_path / "groups.json").write_text(json.dumps(state["param_groups"]))
        state = {"state": {}, "param_groups": json.loads((tmp_path / "groups.json").read_text())}
        for key, tensor in load_file(tmp_path / "state.safetensors").items():
            state["state"].setdefault(int(key.partition("/")[0]), {})[key.partition("/")[2]] = tensor
    after = build(broken, lr=0.1)
    after.load_state_dict(state)
    run(after, range(3, 6))
    assert after.param_groups[0]["lr"] == 1.8
    assert_equal(broken, straight)


def test_state_that_does_not_belong_is_refused() -> None:
    sgd, adamw = OuterOptimizer(anchors(), lr=1.0), OuterOptimizer(anchors(), lr=1.0, optimizer="adamw")
    with pytest.raises(ValueError, match="not that of an OuterOptimizer with optimizer 'sgd'"):
        sgd.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="not that of an OuterOptimizer"):
        sgd.load_state_dict(torch.optim.SGD([p.requires_grad_() for p in anchors()], lr=1.0).state_dict())
    foreign = OuterOptimizer(anchors(), lr=1.0, transform=f"{__name__}:half")
    with pytest.raises(ValueError, match="names the transform 'test_outer:half': build the optimizer with it"):
        sgd.load_state_dict(foreign.state_dict())
    foreign.load_state_dict(foreign.state_dict())


def test_a_copy_goes_its_own_way() -> None:
    ours = anchors()
    optimizer = IsoLoCo(ours)
    run(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    run(twin, range(2, 4))
    assert_equal(ours, optimizer.param_groups[0]["params"])
    run(optimizer, range(2, 4))
    assert_equal(ours, twin.param_groups[0]["params"])


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.9, total_steps=8),
])  # fmt: skip
def test_torch_schedulers_drive_it(make: Any) -> None:
    ours, theirs = anchors(), [p.requires_grad_() for p in anchors()]
    pair = (OuterOptimizer(ours, lr=0.7, momentum=0.9), torch.optim.SGD(theirs, lr=0.7, momentum=0.9))
    for optimizer in pair:
        scheduler = make(optimizer)
        for round in range(6):
            run(optimizer, range(round, round + 1))
            scheduler.step()
    assert_equal(ours, theirs)


def test_a_group_added_later_has_options_of_its_own() -> None:
    first, second = torch.randn(4, 3), torch.randn(3, 4)
    optimizer = IsoLoCo([first])
    optimizer.add_param_group({"params": [second], "transform": "none", "lr": 0.5, "momentum": 0.0, "nesterov": False})
    start = second.clone()
    give([first, second], 0)
    optimizer.step()
    assert optimizer.transformed == 1
    assert torch.equal(second, start - 0.5 * second.grad)  # type: ignore[operator]
    with pytest.raises(ValueError, match="at: got 'before'"):
        optimizer.add_param_group({"params": [torch.zeros(1)], "at": "before"})
    assert len(optimizer.param_groups) == 2


def test_the_closure_comes_first_with_gradients() -> None:
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = IsoLoCo([w], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) == 4.0
    assert (w.detach() ** 2).sum() < 4.0


def test_parameters_without_a_delta_stay() -> None:
    ours = anchors()
    optimizer = IsoLoCo(ours)
    give(ours[:1], 0)
    optimizer.step()
    assert_equal(ours[1:], anchors()[1:])
    assert list(optimizer.state) == [ours[0]]


def test_hooks_of_torch_are_called() -> None:
    calls: list[str] = []
    optimizer = IsoLoCo(anchors())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run(optimizer, range(1))
    assert calls == ["before", "after"]


@pytest.mark.parametrize(("options", "message"), [
    ({"lr": -1.0}, "lr: got -1.0, takes zero or more"),
    ({"lr": float("nan")}, "lr: got nan"),
    ({"momentum": -0.1}, "momentum: got -0.1"),
    ({"nesterov": True}, "nesterov needs momentum above 0"),
    ({"optimizer": "adam"}, "optimizer: got 'adam', takes 'sgd' or 'adamw'"),
    ({"optimizer": "adamw", "momentum": 0.9}, "momentum and nesterov are for optimizer 'sgd'"),
    ({"optimizer": "adamw", "betas": (0.9, 1.0)}, r"betas: got \(0.9, 1.0\)"),
    ({"betas": (0.9, 0.95)}, "betas and eps are for optimizer 'adamw'"),
    ({"at": "both"}, "at: got 'both'"),
    ({"transform": "iso_d"}, "iso_d"),
    ({"transform": "mean"}, "mean is a reduce, not a transform"),
    ({"transform": "iso_c", "transform_options": {"scal": "rms"}}, "iso_c takes no option 'scal'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OuterOptimizer(anchors(), **{"lr": 1.0, **options})


def test_one_line_form() -> None:
    net = nn.Linear(3, 2)
    optimizer = IsoLoCo(net.parameters(), scale="rms", polar="newton_schulz")
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert group == {
        "lr": 1.8, "momentum": 0.8, "nesterov": True, "weight_decay": 0.0, "optimizer": "sgd", "at": "gradient",
        "transform": "iso_c", "transform_options": {"scale": "rms", "polar": "newton_schulz"},
    }  # fmt: skip


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
    assert groups_of(Net(), transform=f"{__name__}:half") == {f"{__name__}:half": everything}
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
