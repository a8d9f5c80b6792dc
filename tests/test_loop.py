"""DiLoCo in a plain loop: one process against the formulas, two and four processes against loops written out here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isoloco
import toy
from forked import together
from isoloco import rules
from isoloco.seeds import generator

H = 3
REDUCES: list[Any] = [
    "mean",
    {"name": "ties", "options": {"density": 0.5}},
    {"name": "dare", "options": {"density": 0.5}},
    "tsv",
    "iso_cts",
]


def network(*, seed: int = 0, tied: bool = False) -> nn.Module:
    return toy.Net(seed=seed, tied=tied)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    toy.loss(model, toy.batch(worker, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, worker: int, steps: int, **options: Any) -> isoloco.DiLoCo:
    """A user's loop around DiLoCo."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = isoloco.IsoLoCo(model.parameters(), lr=0.9, momentum=0.8)
    sync = isoloco.DiLoCo(model, outer, sync_every=H, **options)
    for step in range(steps):
        train_step(model, optimizer, worker, step)
        assert sync.step() == ((step + 1) % H == 0)
    return sync


def independent(reduce: Any, worker: int, workers: int, steps: int) -> dict[str, Tensor]:
    """The same training written out: everybody's parameters are gathered, and Algorithm 2 is spelt."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(a) for name, a in anchor.items()}
    spec = reduce if isinstance(reduce, dict) else {"name": reduce}
    rule, iso_c = rules.bind_reduce(**spec), rules.bind_transform("iso_c")
    for step in range(steps):
        train_step(model, optimizer, worker, step)
        if (step + 1) % H:
            continue
        found: list[Any] = [None] * workers
        dist.all_gather_object(found, {name: p.detach() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            deltas = torch.stack([anchor[name] - other[name] for other in found])
            masks = [generator(42, step // H, name, w) for w in range(workers)] if rule.random else None
            delta = iso_c(rule(deltas, generators=masks))
            momentum[name] = 0.8 * momentum[name] + delta
            anchor[name] = anchor[name] - 0.9 * (delta + 0.8 * momentum[name])
            with torch.no_grad():
                p.copy_(anchor[name])
    return {name: p.detach() for name, p in model.named_parameters()}


def grouped(work: Callable[[int], Any]) -> Callable[[int], Any]:
    """In a gloo group, left at the end."""

    def run(rank: int) -> Any:
        dist.init_process_group("gloo")
        try:
            return work(rank)
        finally:
            dist.destroy_process_group()

    return run


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: object, atol: float = 1e-6) -> None:
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=atol), (what, name)


@pytest.mark.dist
def test_two_workers_agree_with_an_independent_loop(tmp_path: Path) -> None:
    @grouped
    def work(rank: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        found = []
        for reduce in REDUCES:
            model = network(seed=rank)  # rank 0's values are everybody's
            train(model, rank, 3 * H, reduce=reduce)
            found.append((values(model), independent(reduce, rank, 2, 3 * H)))
        return found

    ranks = together(2, work, tmp_path)
    start = values(network())
    for reduce, (ours, theirs), (other, _) in zip(REDUCES, *ranks, strict=True):
        assert_close(ours, theirs, reduce)
        toy.assert_same(ours, other)
        assert not torch.allclose(ours["out.weight"], start["out.weight"], atol=1e-2)


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_killed_in_mid_round_and_resumed_is_exact(wire: str, tmp_path: Path) -> None:
    """Other processes, another initialization, and what was saved: the same to the last bit."""

    def parts(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, isoloco.DiLoCo]:
        model = network(seed=seed)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        outer = isoloco.IsoLoCo(model.parameters(), lr=0.9)
        return model, inner, isoloco.DiLoCo(model, outer, sync_every=H, reduce="ties", wire=wire)

    @grouped
    def straight(rank: int) -> dict[str, Tensor]:
        model, inner, sync = parts(rank, 0)
        for step in range(10):
            if step == 5:
                torch.save({"inner": inner.state_dict(), "sync": sync.state_dict()}, tmp_path / f"{rank}.pt")
            train_step(model, inner, rank, step)
            sync.step()
        return values(model)

    @grouped
    def resumed(rank: int) -> dict[str, Tensor]:
        model, inner, sync = parts(rank, 9)
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        sync.load_state_dict(saved["sync"])
        inner.load_state_dict(saved["inner"])
        for step in range(5, 10):
            train_step(model, inner, rank, step)
            sync.step()
        return values(model)

    (tmp_path / "straight").mkdir()
    (tmp_path / "resumed").mkdir()
    for one, other in zip(
        together(2, straight, tmp_path / "straight"), together(2, resumed, tmp_path / "resumed"), strict=True
    ):
        toy.assert_same(one, other)


@pytest.mark.dist
def test_sharded_parameters_and_groups(tmp_path: Path) -> None:
    """Two workers of two FSDP2 processes each are two workers; a mesh is a group; a non-finite worker sits out."""
    reduces = ["mean", REDUCES[1], "tsv"]

    @grouped
    def work(rank: int) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
        found: dict[str, Any] = {}
        for i, reduce in enumerate(reduces):
            model = network()
            fully_shard(model, mesh=mesh["shards"])
            options = {"reduce": reduce, "process_group": mesh["workers"], "wire": "float32" if i else "bfloat16"}
            sync = train(model, rank // 2, 2 * H, **options)
            found[f"sharded {i}"] = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore
            assert sync.workers == 2
            plain = network()
            train(plain, rank // 2, 2 * H, **options)
            found[f"plain {i}"] = values(plain)
        # one process of one worker breaks, and all of that worker sits out
        model = network()
        fully_shard(model, mesh=mesh["shards"])
        outer = isoloco.OuterOptimizer(model.parameters(), lr=1.0)
        sync = isoloco.DiLoCo(model, outer, sync_every=1, process_group=mesh["workers"])
        with torch.no_grad():
            for p in model.parameters():
                p += 1.0
            if rank == 3:
                next(model.parameters()).to_local()[0] = float("inf")  # type: ignore[operator]
        if rank < 2:
            sync.step()
        else:
            with pytest.warns(UserWarning, match="worker 1, round 1: embedding.weight is not finite"):
                sync.step()
        found["broken"] = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore
        return found

    for found in together(4, work, tmp_path):
        for i, reduce in enumerate(reduces):
            assert_close(found[f"sharded {i}"], found[f"plain {i}"], reduce, atol=2e-3 if i == 0 else 1e-5)
        assert_close(found["broken"], {name: p + 1.0 for name, p in values(network()).items()}, "broken")


@pytest.mark.dist
def test_workers_that_do_not_fit_are_told(tmp_path: Path) -> None:
    @grouped
    def work(rank: int) -> str:
        model = network()
        with pytest.raises(ValueError) as told:
            isoloco.DiLoCo(model, isoloco.IsoLoCo(model.parameters()), sync_every=2 + rank)
        return str(told.value)

    told = together(2, work, tmp_path)
    assert told[0] == "workers 0 and 1 do not fit together: they differ in sync_every, reduce, wire or seed"


# -- one process


@pytest.mark.parametrize("reduce", [REDUCES[0], REDUCES[1], "tsv"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_one_worker_takes_the_outer_step(reduce: Any, wire: str) -> None:
    model, plain = network(), network()
    sync = train(model, 0, 2 * H, reduce=reduce, wire=wire)
    assert (sync.round, sync.step_in_round) == (2, 0)
    toy.assert_same(values(model), sync.anchor)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    for step in range(2 * H):
        train_step(plain, optimizer, 0, step)
    assert not torch.allclose(plain.out.weight, model.out.weight, atol=1e-3)  # type: ignore[union-attr]


def test_any_optimizer_of_torch_s_and_two_inner_ones() -> None:
    model, plain = network(tied=True), network(tied=True)
    for net in (model, plain):
        net.norm.bias.requires_grad_(False)  # type: ignore[union-attr]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(outer, lambda round: 1.0)
    sync = isoloco.DiLoCo(model, outer, sync_every=2)
    for net in (model, plain):
        matrices = [p for p in net.parameters() if p.requires_grad and p.ndim == 2]
        others = [p for p in net.parameters() if p.requires_grad and p.ndim != 2]
        inner = [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(others, lr=0.1)]
        for step in range(4):
            for micro in range(2):  # accumulated gradients
                toy.loss(net, toy.batch(micro, step)).backward()
            for optimizer in inner:
                optimizer.step()
                optimizer.zero_grad()
            if net is model and sync.step():
                schedule.step()
    assert_close(values(model), values(plain), "an outer step of 1 changes nothing")
    assert "norm.bias" not in sync.anchor
    assert "out.weight" not in sync.anchor


def test_a_step_that_a_grad_scaler_skips_counts() -> None:
    """Workers count calls, so that one whose gradient overflows stays with the others; nothing else changes."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = isoloco.DiLoCo(model, isoloco.OuterOptimizer(model.parameters(), lr=1.0), sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        before = values(model)
        scaler.scale(toy.loss(model, toy.batch(0, step)) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(inner)
        scaler.update()
        inner.zero_grad()
        if step == 2:
            toy.assert_same(values(model), before)
        assert sync.step() == (step % 2 == 1)
    assert sync.round == 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_low_precision_moves_the_float32_anchor() -> None:
    """inner lr 0 changes nothing, and outer updates of a thousandth of a bf16 ulp add up."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    still = copy.deepcopy(model)
    sync = isoloco.DiLoCo(model, isoloco.IsoLoCo(model.parameters(), lr=1.8), sync_every=1)
    for _ in range(3):
        sync.step()
    assert torch.equal(model.weight, still.weight)
    assert {a.dtype for a in sync.anchor.values()} == {torch.float32}

    ulp = 2.0**-7  # of bf16 at 1
    outer = isoloco.OuterOptimizer(model.parameters(), lr=1e-3)
    sync = isoloco.DiLoCo(model, outer, sync_every=1)
    for _ in range(700):
        with torch.no_grad():
            model.weight += ulp
        sync.step()
    assert torch.allclose(sync.anchor["weight"], torch.tensor(1.0 + 0.7 * ulp), rtol=0, atol=0.01 * ulp)
    assert torch.equal(model.weight, torch.full((2, 2), 1.0 + ulp, dtype=torch.bfloat16))  # rounded once
    for _ in range(3):  # the anchor lies between two bf16 values now: the copy is what deltas are measured from
        before = sync.anchor["weight"].clone()
        sync.step()
        assert torch.equal(sync.anchor["weight"], before)


def test_errors_say_what_to_do() -> None:
    model, other = network(), network()

    def told(match: str, outer: torch.optim.Optimizer, net: nn.Module = model, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            isoloco.DiLoCo(net, outer, **options)

    told("a parameter that the model does not: make it over", isoloco.IsoLoCo(other.parameters()))
    told("lacks .*: make it over model.parameters", isoloco.IsoLoCo([model.mix.weight]))  # type: ignore[union-attr]
    told("sync_every: got 0", isoloco.IsoLoCo(model.parameters()), sync_every=0)
    told("unknown reduce 'meen'; nearest: mean", isoloco.IsoLoCo(model.parameters()), reduce="meen")
    told("takes one of float32, bfloat16, int8", isoloco.IsoLoCo(model.parameters()), wire="fp8")
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    told("running statistics .*GroupNorm", isoloco.IsoLoCo(normed.parameters()), normed)
    used = isoloco.IsoLoCo(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    used.step()
    told("has taken steps already", used)
    sync = isoloco.DiLoCo(other, isoloco.IsoLoCo(other.parameters()))
    smaller = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the state is another model's"):
        isoloco.DiLoCo(smaller, isoloco.IsoLoCo(smaller.parameters())).load_state_dict(sync.state_dict())
    with torch.no_grad():
        other.mix.weight[0, 0] = float("nan")  # type: ignore[index, union-attr]
    sync.sync_every = 1
    with pytest.warns(UserWarning, match="sits this round out"), pytest.raises(ValueError, match="no worker is left"):
        sync.step()
