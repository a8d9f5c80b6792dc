"""The outer optimizer as one of torch's: files of its state, schedulers, hooks, groups, its options."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isoloco import IsoLoCo, OuterOptimizer
from outer_steps import anchors, assert_equal, give, run


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
    foreign = OuterOptimizer(anchors(), lr=1.0, transform="outer_steps:half")
    with pytest.raises(ValueError, match="names the transform 'outer_steps:half': build the optimizer with it"):
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
