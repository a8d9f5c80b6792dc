"""The outer optimizer inside torchft's own DiLoCo: their local_sgd.py, a stub for the Manager that talks to others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isoloco import IsoLoCo, OuterOptimizer, rules

pytest.importorskip("torchft")

from torchft.local_sgd import DiLoCo


class Done:
    """A collective that has finished."""

    def wait(self) -> None:
        pass


class Manager:
    """What DiLoCo asks of torchft's Manager; ``reduce`` is what the other replicas add to a tensor, in place."""

    _use_async_quorum = False

    def __init__(self, reduce: Callable[[Tensor], Any] = lambda tensor: tensor) -> None:
        self.reduce, self.commits, self.committed = reduce, iter(lambda: True, None), 0
        self.state: dict[str, tuple[Any, Any]] = {}

    def current_step(self) -> int:
        return self.committed

    def should_commit(self) -> bool:
        commit = next(self.commits)
        self.committed += commit
        return commit

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Done:
        self.reduce(tensor)
        return Done()

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.state[key] = (load, save)

    def start_quorum(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(3)).double()


def train(model: nn.Module, inner: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().mean().backward()
        inner.step()
        inner.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), name


def test_diloco_takes_isoloco_as_its_outer_optimizer() -> None:
    """Rounds of torchft's DiLoCo equal Algorithm 2 written out: anchor, local steps, Iso-C of the delta, Nesterov."""
    model, plain = network(), network()
    outer = IsoLoCo(model.parameters(), lr=0.9, momentum=0.8)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(Manager(), [model], inner, outer, sync_every=3):  # type: ignore[arg-type]
        train(model, inner, range(12))
    assert outer.transformed == 2

    iso_c = rules.bind_transform("iso_c")
    inner = torch.optim.AdamW(plain.parameters(), lr=0.01)
    buffers = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for round in range(4):
        anchor = values(plain)
        train(plain, inner, range(3 * round, 3 * round + 3))
        with torch.no_grad():
            for name, p in plain.named_parameters():
                delta = iso_c(anchor[name] - p)
                buffers[name] = 0.8 * buffers[name] + delta
                p.copy_(anchor[name] - 0.9 * (delta + 0.8 * buffers[name]))
    assert_close(values(model), values(plain))


def test_the_mean_is_what_gets_transformed() -> None:
    """With a replica whose deltas are the negative of ours the mean is zero, and nothing moves."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = IsoLoCo(model.parameters())
    with DiLoCo(Manager(lambda t: t.sub_(t.clone())), [model], inner, outer, sync_every=2):  # type: ignore[arg-type]
        train(model, inner, range(4))
    assert_close(values(model), values(network()))


def test_fragments_have_outer_optimizers_of_their_own() -> None:
    """Streaming, one fragment at a time; the last one, a norm, has no matrix and takes plain Nesterov."""
    ended = []
    momentum: dict[str, Any] = {"lr": 0.9, "momentum": 0.8, "nesterov": True}
    for plain in (OuterOptimizer, torch.optim.SGD):
        model = network()
        parts = [model[0], model[2], model[3]]
        outer = [*(IsoLoCo(part.parameters()) for part in parts[:2]), plain(parts[2].parameters(), **momentum)]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(Manager(), parts, inner, outer, sync_every=6):  # type: ignore[arg-type]
            train(model, inner, range(12))
        assert [o.transformed for o in outer if isinstance(o, IsoLoCo)] == [1, 1]
        ended.append(values(model))
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


def test_a_round_that_is_not_committed_leaves_no_trace() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = IsoLoCo(model.parameters())
    manager = Manager()
    manager.commits = iter([False, True])
    with DiLoCo(manager, [model], inner, outer, sync_every=2):  # type: ignore[arg-type]
        train(model, inner, range(2))
        assert_close(values(model), values(network()))
        assert not outer.state
        train(model, inner, range(2))
    assert outer.state


def test_a_replica_recovers_from_anothers_state() -> None:
    """What torchft sends a replica that joins (anchor and outer state) brings it to the same place."""
    straight, late = network(), network()
    ended = []
    handed: dict[str, Any] = {}
    for model in (straight, late):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = IsoLoCo(model.parameters(), lr=0.9 if model is straight else 0.1)
        manager = Manager()
        with DiLoCo(manager, [model], inner, outer, sync_every=2) as diloco:  # type: ignore[arg-type]
            load, save = manager.state["StreamingDiLoCoFragment_0"]
            if model is straight:
                train(model, inner, range(4))
                handed = save()
                handed = {**handed, "outer_optimizer": {**handed["outer_optimizer"]}}
                handed["outer_optimizer"]["state"] = {
                    i: {key: value.clone() for key, value in entry.items()}
                    for i, entry in handed["outer_optimizer"]["state"].items()
                }
            else:
                load(handed)
                diloco._restore_parameters()
            train(model, inner, range(4, 8))
        ended.append(values(model))
    assert_close(*ended)


def test_the_signature_that_torchtitan_calls() -> None:
    """docs/torchtitan.md changes the outer optimizer in this call alone."""
    called = {
        "manager", "model_fragments", "inner_optimizer", "outer_optimizer", "sync_every", "should_quantize",
        "fragment_sync_delay", "fragment_update_alpha",
    }  # fmt: skip
    assert called <= inspect.signature(DiLoCo.__init__).parameters.keys()
    model = network()
    outer = [IsoLoCo([p for p in part.parameters() if p.requires_grad], lr=1.8, momentum=0.8) for part in [model]]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {
        "manager": Manager(), "model_fragments": [model], "inner_optimizer": inner, "outer_optimizer": outer,
        "sync_every": 2, "should_quantize": False, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0,
    }  # fmt: skip
    with DiLoCo(**options):
        train(model, inner, range(4))
    assert outer[0].transformed == 2
