"""The same training in every layout of processes: one, several with a worker or more each, islands of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import toy
from forked import together
from isoloco.comm import Comm
from isoloco.processes import ProcessComm
from isoloco.simulate import build_round

pytestmark = pytest.mark.dist

WORKERS, SYNC_EVERY, ROUNDS = 8, 2, 5
METHODS = ("isoloco", "ties", "dare", "tsv", "iso_cts", "isoloco_muon")
FEWER = ("isoloco", "ties", "tsv")  # with as many processes as workers
WIRES = ("bfloat16", "int8")
LAYOUTS = ((2, 2), (4, 4), (8, 8), (4, 2))  # processes, islands


def batches(worker: int, step: int) -> list[toy.Batch]:
    """Two micro-batches of unequal size."""
    return [toy.batch(worker, step, size=5), toy.batch(worker + 100, step, size=7)]


def training(comm: Comm, method: str, wire: str = "float32") -> dict[int, dict[str, Tensor]]:
    """Anchors after one round and after five."""
    steps = SYNC_EVERY * ROUNDS
    options = {"comm__wire": wire} if wire != "float32" else {}
    config = toy.config(method, workers=WORKERS, sync_every=SYNC_EVERY, steps=steps, **options)
    every = 1 if method == "dp" else SYNC_EVERY
    parts, state = build_round(
        toy.Net(dropout=0.1), toy.loss, batches, config=config, total_steps=steps, weight_fn=toy.weight, comm=comm
    )
    found = {}
    while state.step < steps:
        metrics = parts.run(state, steps=every)
        assert metrics is not None
        if state.step in (SYNC_EVERY, steps):
            found[state.step] = toy.copied(state.anchor)
        assert comm.processes == 1 or metrics["sent_bytes"] > 0
    return found


def every_training(
    comm: Comm, *, ordered: bool, data_parallel: Comm | None = None
) -> dict[str, dict[int, dict[str, Tensor]]]:
    comm.ordered = ordered
    found = {method: training(comm, method) for method in (METHODS if comm.processes < WORKERS else FEWER)}
    found["dp"] = training(data_parallel or comm, "dp")
    return found | {wire: training(comm, "isoloco", wire) for wire in WIRES}


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[int, dict[str, Tensor]]]:
    return every_training(Comm(), ordered=True)


def apart(a: Tensor, b: Tensor, *, outliers: float = 0.0) -> float:
    """Relative distance in norm, but for a fraction of the elements: those that differ most."""
    difference = (a.double() - b.double()).flatten().abs().sort().values
    kept = difference[: difference.numel() - round(outliers * difference.numel() + 0.5 * (outliers > 0))]
    return float(kept.norm() / a.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(("processes", "islands"), LAYOUTS)
def test_every_layout_trains_alike(processes, islands, one_process, tmp_path):
    def work(rank: int) -> Any:
        comm = ProcessComm(device="cpu", islands=islands, ordered=False, timeout_s=60)
        found = {}
        for ordered in (False, True):
            # data-parallel training is one island of all processes
            gradients = ProcessComm(device="cpu", islands=1, ordered=ordered, timeout_s=60)
            found[ordered] = every_training(comm, ordered=ordered, data_parallel=gradients)
        comm.close()
        return found

    results = together(processes, work, tmp_path)
    for found in results[1:]:
        toy.assert_same(found, results[0])  # every process has the same anchor
    for method in results[0][True]:
        expected = one_process[method]
        if islands == processes or method == "dp":
            toy.assert_same(results[0][True][method], expected, method)
        for step, bound in ((SYNC_EVERY, 1e-5), (SYNC_EVERY * ROUNDS, 1e-3)):
            for ordered in (False, True):
                for name, tensor in results[0][ordered][method][step].items():
                    off = apart(expected[step][name], tensor, outliers=1e-5 if method == "ties" else 0.0)
                    assert off <= bound, (method, step, ordered, name, off)


@pytest.mark.parametrize(("workers", "islands", "told"), [(6, 4, "use 4 or 8"), (2, 4, "use 4")])
def test_workers_that_do_not_fit_are_refused_with_the_nearest(workers, islands, told):
    comm = Comm()
    comm.islands = comm.processes = islands
    with pytest.raises(ValueError, match=told):
        comm.hosted(workers)


def test_owners_share_the_modelled_cost():
    comm = Comm()
    comm.processes = comm.islands = 2
    shapes = [(1024, 1024)] * 36 + [(2688, 1024)] * 18 + [(1024, 2688)] * 9 + [(32000, 1024)] * 2
    from isoloco.reduction import costs

    cost = costs({str(i): torch.empty(shape, device="meta") for i, shape in enumerate(shapes)})
    owner = comm.owners(cost)
    loads = [sum(cost[name] for name, rank in owner.items() if rank == each) for each in range(2)]
    assert max(loads) <= 1.1 * min(loads)
