"""The outer step of two processes that own half of the model each, against one that owns all: wall and CPU time.

    python -m benchmarks.owner_step [--toy] [--out DIR]

The 178M model's shapes, two workers, one thread for each process, on one machine: exchange, reduce, transform, momentum
and publish, for IsoLoCo (mean, then Iso-C) and TSV-M (a joint rule). CPU time of the busier process is beside the wall
time, since on a machine that others use two processes may not get two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Bar, report

WORKERS = 2
SHAPES = {(1024, 1024): 36, (2688, 1024): 18, (1024, 2688): 9, (32000, 1024): 2}
TOY_SHAPES = {(64, 64): 8, (128, 64): 4, (64, 128): 2, (512, 64): 2}
METHODS = {"isoloco": ("mean", "iso_c"), "tsv": ("tsv", "none")}


def member(method: str, processes: int, *, toy: bool) -> dict[str, float]:
    """One outer step as this process takes it: wall and CPU seconds, and its share of the modelled cost."""
    from isoloco.comm import Comm
    from isoloco.outer import OuterOptimizer
    from isoloco.processes import ProcessComm
    from isoloco.reduction import Reduction, costs
    from isoloco.round import Part, RoundState
    from isoloco.rules import bind_reduce
    from isoloco.worker import WorkerState

    torch.set_num_threads(1)
    reduce, transform = METHODS[method]
    shapes = TOY_SHAPES if toy else SHAPES
    comm = Comm() if processes == 1 else ProcessComm(device="cpu", islands=processes, ordered=False, timeout_s=600)
    named = [shape for shape, count in shapes.items() for _ in range(count)]
    anchor = {f"p{i}": torch.zeros(shape) for i, shape in enumerate(named)}
    hosted = comm.hosted(WORKERS)
    cost = costs(anchor)
    owner = comm.owners(cost)
    state = RoundState(anchor=anchor, workers={w: WorkerState() for w in hosted})
    reduction = Reduction(
        bind_reduce(reduce), anchor, owner=owner, hosted=len(hosted), wire="float32", seed=0, comm=comm
    )
    outer = OuterOptimizer(
        [(name, p) for name, p in anchor.items() if owner[name] == comm.rank],
        lr=0.7, momentum=0.8, nesterov=True, transform=transform,
    )  # fmt: skip
    for worker in hosted:
        keyed = torch.Generator().manual_seed(worker)
        deltas = {name: 1e-3 * torch.randn(p.shape, generator=keyed) for name, p in anchor.items()}
        state.parts.append(Part(worker, 1.0, 0.0, 0, reduction.add(state, worker, deltas, weight=1.0)))
        del deltas
    everyone = comm.gather(state.parts)
    wall, cpu = time.perf_counter(), time.process_time()
    reduction.finish(state, [everyone[rank] for rank in comm.peers()])
    outer.step()
    outer.zero_grad()
    comm.publish(anchor, owner)
    found = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    loads = [sum(cost[name] for name, rank in owner.items() if rank == each) for each in range(processes)]
    comm.close()
    return {**found, "load": loads[comm.rank] / (sum(loads) / processes)}


def measure(method: str, processes: int, *, toy: bool) -> list[dict[str, float]]:
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        found.close()
        argv = [sys.executable, "-m", "benchmarks.owner_step", "--member", method, str(processes), folder]
        launch = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        children = [
            subprocess.Popen([*argv, *["--toy"] * toy], env={**launch, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
            for rank in range(processes)
        ]
        if any(child.wait() for child in children):
            raise OSError("a process of the benchmark failed; see its last lines")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    rows, bars = [], []
    for method in METHODS:
        one, two = measure(method, 1, toy=toy)[0], measure(method, 2, toy=toy)
        wall, cpu = max(each["wall_s"] for each in two), max(each["cpu_s"] for each in two)
        rows.append({
            "method": method, "one_wall_s": one["wall_s"], "two_wall_s": wall, "wall_ratio": wall / one["wall_s"],
            "one_cpu_s": one["cpu_s"], "two_cpu_s": cpu, "cpu_ratio": cpu / one["cpu_s"],
            "heaviest_load": max(each["load"] for each in two),
        })  # fmt: skip
        ratio = rows[-1]["wall_ratio"]
        bars.append(Bar(what=f"{method}: at most 0.6 of one process", measured=f"{ratio:.3f}", passed=ratio <= 0.6))
    load = max(row["heaviest_load"] for row in rows)
    return rows, [*bars, Bar(what="owners' loads within 10 %", measured=f"{load - 1:.1%}", passed=load <= 1.1)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (%(default)s)")
    parser.add_argument("--member", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.member:
        method, processes, folder = args.member
        found = member(method, int(processes), toy=args.toy)
        (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return 0
    rows, bars = run(toy=args.toy)
    return report("owner_step", rows, bars, out=args.out)


if __name__ == "__main__":
    raise SystemExit(main())
