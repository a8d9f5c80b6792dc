"""Bytes of a round: what we count, what the kernel counts on the interface, what gathering all deltas would take.

    python -m benchmarks.wire_bytes [--toy] [--out DIR]

P processes, each in a network namespace of its own, exchange and publish a model of 21 M parameters, without training:
one worker each, an additive rule. The kernel's count is the difference over the rounds, with TCP and IP headers and
acknowledgements. Islands of two have both members in namespaces too: what leaves an island is the sum of its members'.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Bar, report
from benchmarks.network import INSIDE, Network, enter, network

ROUNDS = 2
SHAPES = [(2048, 512), *[(512, 512)] * 24, *[(1376, 512)] * 12, *[(512, 1376)] * 6, *[(512,)] * 13, (2048, 512)]
TOY_SHAPES = [(64, 16), *[(16, 16)] * 8, (16,), (64, 16)]
LAYOUTS = (("additive", 2, 2), ("additive", 4, 4), ("additive", 8, 8), ("int8", 2, 2), ("all_gather", 2, 2),
           ("all_gather", 4, 4), ("all_gather", 8, 8), ("islands of 2", 4, 2))  # fmt: skip


TOY_LAYOUTS = tuple(layout for layout in LAYOUTS if layout[1] == 2 or layout[0] == "islands of 2")


def member(kind: str, islands: int, shapes: list[tuple[int, ...]], place: Path) -> None:
    """One process: rounds of exchange and publish between two signs that the counting process looks for."""
    import torch.distributed as dist

    from isoloco.processes import ProcessComm
    from isoloco.reduction import Reduction, costs
    from isoloco.round import Part, RoundState
    from isoloco.rules import bind_reduce
    from isoloco.worker import WorkerState

    torch.set_num_threads(1)
    comm = ProcessComm(device="cpu", islands=islands, ordered=False, timeout_s=300)
    anchor = {f"p{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    worker = comm.hosted(islands)[0]
    state = RoundState(anchor=anchor, workers={worker: WorkerState()})
    reduction = Reduction(
        bind_reduce("mean"), anchor, owner=comm.owners(costs(anchor)), hosted=1,
        wire="int8" if kind == "int8" else "float32", seed=0, comm=comm,
    )  # fmt: skip
    deltas = {name: torch.randn(p.shape) for name, p in anchor.items()}

    def meet(sign: str) -> None:
        comm.gather(None)
        (place / f"{comm.rank}.{sign}").touch()
        while not (place / f"go.{sign}").exists():
            time.sleep(0.001)

    comm.gather(None)
    if kind == "all_gather":
        _gather_all(deltas, dist, comm.processes)  # connections are made with the first
    meet("begin")
    before, exchanged = comm.sent_bytes, 0
    for _ in range(ROUNDS):
        if kind == "all_gather":
            _gather_all(deltas, dist, comm.processes)
            comm.sent_bytes += (comm.processes - 1) * sum(d.numel() * 4 for d in deltas.values())
            continue
        started = comm.sent_bytes
        square = reduction.add(state, worker, deltas, weight=1.0)
        state.parts = [Part(worker, 1.0, 0.0, 0, square)]
        everyone = comm.gather(state.parts)
        reduction.finish(state, [everyone[rank] for rank in comm.peers()])
        exchanged += comm.sent_bytes - started
        comm.publish(anchor, reduction.owner)
    counted = {"sent": comm.sent_bytes - before, "exchanged": exchanged, "link": comm.link_bytes}
    meet("end")
    (place / f"{comm.rank}.json").write_text(json.dumps(counted))
    comm.close()


def _gather_all(deltas: dict[str, Tensor], dist: Any, processes: int) -> None:
    """The authors' way to a mean: every process gets every delta."""
    for delta in deltas.values():
        dist.all_gather([torch.empty_like(delta) for _ in range(processes)], delta)


def measure(net: Network, kind: str, islands: int, *, toy: bool, port: int) -> list[dict[str, int]]:
    """What each process counted, with the kernel's count of what it sent and received."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        argv = [sys.executable, "-m", "benchmarks.wire_bytes", "--member", kind, str(islands), folder]
        children = [net.start(i, [*argv, *["--toy"] * toy], port=port) for i in range(net.hosts)]
        counts = {}
        for sign in ("begin", "end"):
            while not all((place / f"{i}.{sign}").exists() for i in range(net.hosts)):
                if any(child.poll() not in (None, 0) for child in children):
                    raise OSError("a process of the benchmark failed; see its last lines")
                time.sleep(0.001)
            counts[sign] = [net.counted(i) for i in range(net.hosts)]
            (place / f"go.{sign}").touch()
        for child in children:
            child.wait()
        found = [json.loads((place / f"{i}.json").read_text()) for i in range(net.hosts)]
    for i, each in enumerate(found):
        each["kernel_sent"] = counts["end"][i][0] - counts["begin"][i][0]
        each["kernel_received"] = counts["end"][i][1] - counts["begin"][i][1]
    return found


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    elements = sum(torch.Size(shape).numel() for shape in (TOY_SHAPES if toy else SHAPES))
    rows, exchanged = [], {}
    for k, (kind, processes, islands) in enumerate(TOY_LAYOUTS if toy else LAYOUTS):
        with network(processes) as net:
            found = measure(net, kind, islands, toy=toy, port=29500 + k)
        members = processes // islands
        per_round = [each["sent"] / ROUNDS for each in found]
        link = [sum(each["link"] for each in found[i * members :][:members]) / ROUNDS for i in range(islands)]
        whole = 2 * 4 * elements * (processes - 1) / processes
        exchanged[kind, processes] = max(each["exchanged"] for each in found)
        rows.append({
            "kind": kind, "processes": processes, "islands": islands,
            "counted_MB": max(per_round) / 1e6,
            "kernel_sent_MB": max(each["kernel_sent"] for each in found) / ROUNDS / 1e6,
            "kernel_received_MB": max(each["kernel_received"] for each in found) / ROUNDS / 1e6,
            "kernel/counted": max(each["kernel_sent"] / each["sent"] for each in found),
            "sent/2N(P-1)/P": max(per_round) / whole,
            "received/2N(P-1)/P": max(each["kernel_received"] for each in found) / ROUNDS / whole,
            "island_link_MB": max(link) / 1e6,
        })  # fmt: skip
    return rows, bars(rows, exchanged, elements=elements)


def bars(rows: list[dict[str, Any]], exchanged: dict[tuple[str, int], int], *, elements: int) -> list[Bar]:
    additive = [row for row in rows if row["kind"] == "additive"]
    worst = max(abs(row["kernel/counted"] - 1) for row in rows)
    sent = max(abs(row["sent/2N(P-1)/P"] - 1) for row in additive)
    received = max(abs(row["received/2N(P-1)/P"] - 1) for row in additive)
    two = next(row for row in additive if row["processes"] == 2)
    islands = next(row for row in rows if row["kind"] == "islands of 2")
    int8 = next(row for row in rows if row["kind"] == "int8")
    code = exchanged["int8", 2] / exchanged["additive", 2]
    return [
        Bar(what="counted bytes within 5 % of the kernel's", measured=f"{worst:.1%}", passed=worst <= 0.05),
        Bar(what="sent within 5 % of 2N(P-1)/P", measured=f"{sent:.1%}", passed=sent <= 0.05),
        Bar(what="received within 5 % of 2N(P-1)/P", measured=f"{received:.1%}", passed=received <= 0.05),
        Bar(
            what="link of an island of 2 within 5 % of that of 1",
            measured=f"{islands['island_link_MB'] / two['island_link_MB'] - 1:+.1%}",
            passed=abs(islands["island_link_MB"] / two["island_link_MB"] - 1) <= 0.05,
        ),
        Bar(what="int8: exchange at most 0.30 of float32", measured=f"{code:.3f}", passed=code <= 0.30),
        Bar(
            what="int8: a round at most 0.65 of float32",
            measured=f"{int8['counted_MB'] / two['counted_MB']:.3f}",
            passed=int8["counted_MB"] <= 0.65 * two["counted_MB"],
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes, few processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (%(default)s)")
    parser.add_argument("--member", nargs=3, default=None, help=argparse.SUPPRESS)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.member:
        kind, islands, place = args.member
        member(kind, int(islands), TOY_SHAPES if args.toy else SHAPES, Path(place))
        return 0
    code = enter("benchmarks.wire_bytes", list(sys.argv[1:] if argv is None else argv))
    if code is not None:
        return code
    rows, found = run(toy=args.toy)
    return report("wire_bytes", rows, found, out=args.out)


if __name__ == "__main__":
    raise SystemExit(main())
