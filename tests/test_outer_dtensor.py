"""The outer step on parameters sharded over two processes (FSDP2, gloo) equals the unsharded one, uneven shards too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from isoloco import IsoLoCo, OuterOptimizer

pytestmark = pytest.mark.dist

WORLD = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "isoloco": {"momentum": 0.8, "nesterov": True, "transform": "iso_c"},
    "isoloco, update side": {"momentum": 0.8, "nesterov": True, "transform": "iso_c", "at": "update"},
    "clip_high, heavy ball, decay": {"momentum": 0.8, "transform": "clip_high", "weight_decay": 0.1},
    "diloco": {"momentum": 0.9, "nesterov": True},
    "adamw": {"optimizer": "adamw", "transform": "iso_c"},
    "adamw, update side": {"optimizer": "adamw", "transform": "iso_c", "at": "update"},
}


def network() -> nn.Module:
    """Rows that two processes share evenly (8), unevenly (7, 3) and not at all (1); biases alike."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 7), nn.Linear(7, 3), nn.Linear(3, 1))


def deltas(model: nn.Module, round: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(round)
    return {name: torch.randn(tuple(p.shape), generator=generator) for name, p in model.named_parameters()}


def process(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        check_fsdp2_equals_unsharded()
        check_other_placements()
    finally:
        dist.destroy_process_group()


def check_fsdp2_equals_unsharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    for what, options in OPTIONS.items():
        whole, sharded = network(), network()
        fully_shard(sharded, mesh=mesh)
        reference = OuterOptimizer(whole.named_parameters(), lr=0.7, **options)
        optimizer = OuterOptimizer(sharded.named_parameters(), lr=0.7, **options)
        for round in range(3):
            given = deltas(whole, round)
            for name, p in whole.named_parameters():
                p.grad = given[name].clone()
            for name, p in sharded.named_parameters():
                assert isinstance(p, DTensor)
                p.grad = distribute_tensor(given[name], mesh, p.placements)
            reference.step()
            optimizer.step()
            assert optimizer.transformed == reference.transformed == (4 if "transform" in options else 0)
        for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(q, DTensor)
            assert torch.allclose(q.full_tensor(), p, rtol=1e-6, atol=1e-7), (what, name)
            buffers = [state for state in optimizer.state[q].values() if state.ndim]
            assert all(b.placements == q.placements and b.to_local().shape == q.to_local().shape for b in buffers)


def check_other_placements() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, WORLD))
    start, delta = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), deltas(nn.Linear(7, 5), 2)["weight"]
    expected = start.clone()
    expected.grad = delta
    IsoLoCo([expected]).step()
    for placements in ([Replicate(), Shard(1)], [Shard(0), Replicate()], [Shard(1), Shard(0)]):
        p = distribute_tensor(start.clone(), mesh, placements)
        p.grad = distribute_tensor(delta, mesh, placements)
        IsoLoCo([p]).step()
        assert torch.allclose(p.full_tensor(), expected, rtol=1e-6, atol=1e-7), placements
        assert torch.equal(p.grad.full_tensor(), delta), placements  # type: ignore[union-attr]

    p = distribute_tensor(start.clone(), mesh, [Replicate(), Replicate()])
    p.grad = DTensor.from_local(delta, mesh, [Replicate(), Partial()])
    with pytest.raises(ValueError, match=r"w: cannot transform a delta placed as .*Partial.* takes Shard and Repl"):
        IsoLoCo([("w", p)]).step()
    assert torch.equal(p.full_tensor(), start)


def test_sharded_parameters_take_the_same_step(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path / "store"),), nprocs=WORLD)  # type: ignore[attr-defined]
