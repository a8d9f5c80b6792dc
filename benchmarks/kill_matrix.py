"""Kill trainings with SIGKILL in every phase, go on with them, and compare with the training that was never killed.

    python -m benchmarks.kill_matrix

A kill comes from another process, at a random moment inside a phase that the victim has announced. Which phase it hit
is read from what the dead process left: its phases up to the last one, its records, the checkpoint that was being
written. A kill that hit another phase than the one aimed at does not count for that one. Then the same command goes on
to the end, and everything has to be the same bit for bit: the model, the last checkpoints with every worker's optimizer
state and the outer optimizer's, and all records but for their seconds, each worker's loss at each step among them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isoloco.files import digest
from isoloco.metrics import comparable, read_metrics
from isoloco.saved import MANIFEST, read_manifest, verify, whole

from .common import RESULTS, Bar, report
from .victims import Job, Line, Nursery

# what is aimed at, and the announcement after which the killer strikes
PHASES = {
    "inner": ("inner",),
    "reduction": ("delta", "reduce"),
    "outer": ("outer",),
    "evaluation": ("eval",),
    "checkpoint": ("checkpoint",),
    "start": ("begin",),
    "end": ("checkpoint",),  # the last one: model, sample and summary are still to come
}
# a GPT-2 with dropout under every one; states on disk and a lossy wire with its error feedback come along
METHODS: dict[str, dict[str, Any]] = {
    "isoloco": {},
    "ties": {"compute.worker_state": "disk"},
    "iso_cts": {"comm.wire": "int8"},
    "isoloco_muon": {},
}
STEPS, SYNC_EVERY, WORKERS, VOCAB, SEQ_LEN = 14, 4, 3, 64, 16  # rounds of 4 steps, the last one of 2
NETWORK = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": None, "n_positions": SEQ_LEN,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One kill: where it was aimed, what it hit ("none": the victim had ended), and how the run differed at its end."""

    method: str
    aimed: str
    hit: str
    differences: tuple[str, ...]


class Range:
    """Where victims train: their data and network, and for each method the run that nobody kills."""

    def __init__(self, place: Path, nursery: Nursery, *, seed: int) -> None:
        self.place, self.nursery, self.random = place, nursery, random.Random(seed)
        self._numbers = 0
        self._whole: dict[str, tuple[Path, list[Line]]] = {}
        self._lately: list[Line] = []  # phases of the process that went on last: how fast the machine is now
        data = place / "data"
        data.mkdir()
        tokens = np.random.default_rng(0)
        for split, count in (("train", 200 * SEQ_LEN), ("valid", 100 * SEQ_LEN), ("test", SEQ_LEN)):
            np.save(data / f"{split}_000000.npy", tokens.integers(VOCAB, size=count).astype(np.uint16))
        (place / "network.json").write_text(json.dumps(NETWORK), "utf-8")

    def job(self, name: str, method: str) -> Job:
        options = {
            "out_dir": str(self.place / name), "method": method, "model.config": str(self.place / "network.json"),
            "model.seq_len": SEQ_LEN, "data.path": str(self.place / "data"), "workers": WORKERS,
            "sync_every": SYNC_EVERY, "global_batch_size": 2 * WORKERS, "micro_batch_size": 1, "budget.steps": STEPS,
            "eval.every_rounds": 1, "eval.tokens": 100 * SEQ_LEN, "checkpoint.every_rounds": 1, "log.every_steps": 1,
            "log.spectra_every_rounds": 1000, "compute.threads": 1,
        }  # fmt: skip
        return Job(options | METHODS[method], self.place / f"{name}.phases", self.place / f"{name}.printed")

    def whole(self, method: str) -> tuple[Path, list[Line]]:
        """The run that was not killed, and its phases."""
        if not self._whole:
            self.nursery.here(self.job("warm-up", method))  # imports whatever a training imports
        if method not in self._whole:
            job = self.job(f"{method}-whole", method)
            self.nursery.here(job)
            self._whole[method] = (Path(job.options["out_dir"]), job.read())
        return self._whole[method]

    def kill(self, method: str, phase: str) -> Outcome:
        """Kill a training at a random moment of a phase, go on with it to its end, and compare."""
        reference, lines = self.whole(method)
        self._numbers += 1
        job = self.job(f"{method}-{self._numbers}", method)
        run = Path(job.options["out_dir"])
        number, delay_s = self._aim(reference, lines, phase)
        victim = self.nursery.start(job)
        writing = run / "checkpoints" if phase == "checkpoint" else None
        _strike(victim, job, PHASES[phase], number, delay_s, writing)
        if self.nursery.wait(victim) != -signal.SIGKILL:
            return Outcome(method, phase, "none", differences(reference, run))
        hit = phase_hit(run, job.read())
        after = self.job(f"{method}-{self._numbers}-on", method)
        resumed = Job(job.options, after.phases, after.printed)
        if code := self.nursery.wait(self.nursery.start(resumed)):
            last = (resumed.printed.read_text("utf-8").strip().splitlines() or ["it printed nothing"])[-1]
            return Outcome(method, phase, hit, (f"did not go on, exit code {code}: {last}",))
        self._lately = resumed.read()
        found = differences(reference, run)
        if not found:
            shutil.rmtree(run)
        return Outcome(method, phase, hit, found)

    def _aim(self, reference: Path, lines: list[Line], phase: str) -> tuple[int, float]:
        """Which announcement of the phase, counted from 0, and how long after it: at most as long as it took."""
        saves = [line for line in lines if line.phase == "checkpoint"]
        # written beside the next round, until its manifest is there
        writing_s = (whole(reference / "checkpoints")[-1] / MANIFEST).stat().st_mtime - saves[-1].time
        places = [i for i, line in enumerate(lines) if line.phase in PHASES[phase]]
        lately = self._lately or lines
        if phase == "end":
            last = [line for line in lately if line.phase in ("begin", "checkpoint")][-1]
            chosen, length_s = len(places) - 1, lately[-1].time - last.time
        elif phase == "start":
            first = next((line for line in lately if line.phase == "turn"), lately[-1])
            chosen, length_s = 0, first.time - lately[0].time
        elif phase == "checkpoint":
            chosen, length_s = self.random.randrange(len(places)), writing_s
        else:
            clear = [
                n for n, i in enumerate(places)
                if not _is_last_step(lines[i]) and not any(0 <= lines[i].time - s.time < 2 * writing_s for s in saves)
            ]  # fmt: skip
            chosen = self.random.choice(clear or range(len(places)))
            length_s = lines[places[chosen] + 1].time - lines[places[chosen]].time
        return chosen, self.random.uniform(0, length_s)


def _strike(
    victim: int, job: Job, announced: tuple[str, ...], number: int, delay_s: float, writing: Path | None
) -> None:
    """SIGKILL some time after the ``number``-th of these announcements; nothing where the victim ends before.

    ``writing``: a directory; the time counts from when a checkpoint is begun there.
    """
    while not job.phases.exists():
        time.sleep(0.0002)
    with job.phases.open("rb") as file:
        rest, seen = b"", 0
        while not _is_dead(victim):
            *lines, rest = (rest + file.read()).split(b"\n")
            phases = [json.loads(line)[0] for line in lines]
            if "end" in phases:
                return
            seen += sum(phase in announced for phase in phases)
            if seen > number and (writing is None or any(writing.glob(".r*"))):
                time.sleep(delay_s)
                os.kill(victim, signal.SIGKILL)
                return
            time.sleep(0.0002)


def _is_dead(process: int) -> bool:
    """Whether a process has ended by itself: its parent has yet to ask how."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text("utf-8").rpartition(")")[2].split()[0] == "Z"


def phase_hit(run: Path, lines: list[Line]) -> str:
    """The phase in which a process died, from what it left; "between" where it was in none of them."""
    if any((run / "checkpoints").glob(".r*")):
        return "checkpoint"  # a checkpoint that has no name yet, or is being removed
    last = lines[-1]
    records = read_metrics(run) if run.is_dir() else []

    def recorded(kind: str) -> bool:
        return any(
            record["kind"] == kind and record["round"] == last.info["round"] + (kind == "round") for record in records
        )

    if last.phase == "begin":
        return "start"
    if last.phase in ("turn", "inner") and not _is_last_step(last):
        return "inner"
    if last.phase in ("delta", "reduce"):
        return "reduction"
    if last.phase == "outer" and not recorded("round"):
        return "outer"
    if last.phase == "eval" and not recorded("eval"):
        return "evaluation"
    if last.phase == "checkpoint" and _ends(run):
        return "end"
    return "between"


def _is_last_step(line: Line) -> bool:
    """Whether this was the last step of a turn, after which the delta is taken."""
    done = line.info.get("step", -1) + 1
    return line.phase == "inner" and (done % SYNC_EVERY == 0 or done == STEPS)


def _ends(run: Path) -> bool:
    """Whether all is trained and saved, and the run not marked as finished yet."""
    saved = whole(run / "checkpoints")
    done = bool(saved) and read_manifest(saved[-1])["state"]["step"] == STEPS
    return done and json.loads((run / "run.json").read_text("utf-8"))["state"] != "finished"


def differences(reference: Path, run: Path) -> tuple[str, ...]:
    """In what a run differs from one that was never killed, or what it has left lying about."""
    found = []
    mine, theirs = comparable(read_metrics(reference)), comparable(read_metrics(run))
    if mine != theirs:
        first = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), "the last")
        found.append(f"metrics.jsonl, record {first} ({len(mine)} and {len(theirs)} records)")
    one, other = _contents(reference), _contents(run)
    found += [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    known = {path.name for path in reference.iterdir()}
    found += [f"{path.name} is left" for path in sorted(run.iterdir()) if path.name not in known]
    found += [f"{path.name} is left" for path in sorted((run / "checkpoints").glob(".*"))]
    if json.loads((run / "run.json").read_text("utf-8"))["state"] != "finished":
        found.append("run.json: not finished")
    return tuple(found)


def _contents(run: Path) -> dict[str, Any]:
    """What is in the models' files and in the checkpoints': optimizer states, anchor, where the training stands."""
    models = [path for name in ("model", "best") for path in (run / name).iterdir()]
    found: dict[str, Any] = {f"{path.parent.name}/{path.name}": digest(path) for path in models}
    for checkpoint in whole(run / "checkpoints"):
        manifest = read_manifest(checkpoint)
        verify(checkpoint, manifest)
        found |= {f"{checkpoint.name}/{name}": entry["blake2b"] for name, entry in manifest["files"].items()}
        found |= {f"{checkpoint.name}: {key}": manifest[key] for key in ("state", "records")}
    return found


def run_matrix(place: Path, *, kills: dict[str, int], methods: list[str], seed: int, most: int = 8) -> list[Outcome]:
    """Kill until each phase was hit as often as asked, methods in turn, with at most ``most`` tries for each hit."""
    outcomes: list[Outcome] = []
    with Nursery() as nursery:
        field = Range(place, nursery, seed=seed)
        for phase, wanted in kills.items():
            for _ in range(wanted * most):
                hits = sum(outcome.hit == phase for outcome in outcomes)
                if hits >= wanted:
                    break
                outcomes.append(field.kill(methods[len(outcomes) % len(methods)], phase))
                _tell(outcomes[-1], hits, wanted)
    return outcomes


def _tell(outcome: Outcome, before: int, kills: int) -> None:
    verdict = "; ".join(outcome.differences) or "equal"
    done = before + (outcome.hit == outcome.aimed)
    print(
        f"{outcome.aimed:<10} {done:>3}/{kills}  {outcome.method:<13} hit {outcome.hit:<11} {verdict}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def rows_of(outcomes: list[Outcome], phases: list[str], methods: list[str]) -> list[dict[str, Any]]:
    """A row for each phase: kills that hit it by method, and how many of those runs ended equal."""
    rows = []
    for phase in [*phases, "between"]:
        hit = [outcome for outcome in outcomes if outcome.hit == phase]
        by_method = {method: sum(outcome.method == method for outcome in hit) for method in methods}
        equal = sum(not outcome.differences for outcome in hit)
        rows.append({"phase": phase, **by_method, "kills": len(hit), "equal": equal})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_matrix", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--kills", type=int, default=10, help="kills that have to hit each phase (%(default)s)")
    add("--phases", nargs="+", default=list(PHASES), choices=list(PHASES), help="default: all")
    add("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="default: all")
    add("--seed", type=int, default=0, help="of the moments (%(default)s)")
    add("--out", type=Path, default=RESULTS, help="directory of kill_matrix.json and .csv (%(default)s)")
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_matrix-") as place:
        kills = dict.fromkeys(args.phases, args.kills)
        outcomes = run_matrix(Path(place), kills=kills, methods=args.methods, seed=args.seed)
    rows = rows_of(outcomes, args.phases, args.methods)
    hits = {row["phase"]: row["kills"] for row in rows}
    killed = [outcome for outcome in outcomes if outcome.hit != "none"]
    equal = sum(not outcome.differences for outcome in killed)
    bars = [
        Bar(what=f"kills in {phase}", measured=f"{hits[phase]}, wanted {args.kills}", passed=hits[phase] >= args.kills)
        for phase in args.phases
    ]
    bars.append(
        Bar(what="runs that ended bitwise equal", measured=f"{equal} of {len(killed)}", passed=equal == len(killed))
    )
    code = report("kill_matrix", rows, bars, out=args.out)
    print(f"\n{len(outcomes)} victims in {time.monotonic() - started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
