"""Studies: a named set of runs that fills one table or figure.

A study is a YAML file of cells. A cell has options over a recipe, and may have axes to be tuned: its trials climb from
a start along ladders, one axis after the other, until no neighbour of the best is better, and go on around it up to
the study's number of trials, the same for every cell. The best is then run for every seed.

The run directory is the truth: a run is keyed by the hash of its options, claimed by a file lock, and is a subprocess
of its own. So a study can be stopped and started, by several processes at once; what is done is not done again, what
was cut short goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .study_board import WHY, Board, Run
from .study_claims import Claim, forget, take
from .study_file import load as load  # a study is loaded, laid out on a board, and run


def run_study(
    board: Board,
    *,
    jobs: int = 1,
    threads: int | None = None,
    devices_per_run: int = 0,
    say: Callable[[str], None] = print,
    rows: Path | None = None,
    watch: Callable[[], None] = lambda: None,
) -> bool:
    """Run what is left, ``jobs`` at a time; several processes may do so at once. False if a run failed for good.

    Each run has the CPU threads that its recipe says, or else ``threads``, by default its share of the machine's. With
    ``devices_per_run`` each has so many GPUs of its own. ``watch`` is called about once a second. When this process is
    interrupted its runs save themselves; when it is killed they go on, and keep their claims.
    """
    board.root.mkdir(parents=True, exist_ok=True)
    share = threads or max(1, (os.cpu_count() or 1) // jobs)
    threads_of = {cell.name: board.study.config(cell).compute.threads or share for cell in board.study.cells}
    devices = _shares(jobs, devices_per_run) if devices_per_run else [[]] * jobs
    active: dict[str, Active] = {}
    try:
        while True:
            for key, one in list(active.items()):
                if one.process.poll() is not None:
                    _settle(board, one.run, one.process.returncode, say)
                    one.claim.release()
                    del active[key]
                    if rows:
                        board.write_rows(rows)
                else:
                    one.claim.beat()
            wanted = [run for cell in board.study.cells for run in board.wanted(cell)]
            for run in wanted:
                if len(active) >= jobs:
                    break
                if run.key not in active and (claim := take(board.root, run.key)) is not None:
                    _tidy(board, run)
                    if board.loss(run) is not None:  # somebody else finished it in between
                        claim.release()
                        continue
                    slot = min(set(range(jobs)) - {one.slot for one in active.values()})
                    process = _start(board, run, threads_of[run.cell], claim.handles, devices[slot])
                    claim.beat(pid=process.pid)
                    active[run.key] = Active(run, process, claim, slot)
                    say(f"{run.cell} {run.kind} seed {run.seed}: {_told(board, run)}")
            watch()
            if not active and not wanted:
                break
            time.sleep(1.0)
    finally:
        for one in active.values():
            if one.process.poll() is None:
                one.process.terminate()  # a run saves itself, and goes on from there the next time
        for one in active.values():
            one.process.wait()
            one.claim.release()
    if rows:
        board.write_rows(rows)
    everything = [(run, loss) for _, run, loss in board.everything()]
    forget(board.root, (run.key for run, loss in everything if loss is not None))
    return not any(board.failed(run) for run, _ in everything)


@dataclass(frozen=True)
class Active:
    """A run that this process has started."""

    run: Run
    process: subprocess.Popen[bytes]
    claim: Claim
    slot: int


def _shares(jobs: int, each: int) -> list[list[str]]:
    """The devices of each job. ValueError where there are not enough."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        import torch

        found = [str(i) for i in range(torch.cuda.device_count())]
    else:
        found = [name.strip() for name in listed.split(",") if name.strip()]
    if len(found) < jobs * each:
        raise ValueError(
            f"--jobs {jobs} with --devices-per-run {each} takes {jobs * each} GPUs, found {len(found)}: lower one"
        )
    return [found[i * each : (i + 1) * each] for i in range(jobs)]


def _tidy(board: Board, run: Run) -> None:
    """Move away what a process that died has left, but for a run that has a checkpoint to go on from."""
    if board.directory(run).exists() and not board.can_go_on(run) and board.loss(run) is None:
        state = board.manifest(run).get("state")
        _set_aside(board, run, "failed" if state == "failed" else "interrupted", board.manifest(run).get("error") or "")


def _start(
    board: Board, run: Run, threads: int, handles: tuple[int, ...] = (), devices: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a run as a process of its own, or one for each of its devices. It holds the claim as long as it lives."""
    logs = board.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={len(devices)}", "-m"]
    argv = [sys.executable, "-m", *(several if len(devices) > 1 else []), "isoloco", "train", board.study.recipe]
    argv += [f"--out_dir={board.directory(run)}", f"--compute.threads={threads}"]
    argv += [f"--{key}={_spelled(value)}" for key, value in run.options.items()]
    if board.can_go_on(run):
        argv.append("--resume=auto")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with (logs / f"{run.key}.log").open("wb") as log:
        return subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            pass_fds=handles, start_new_session=True,  # Ctrl-C is for this process, which tells its runs
        )  # fmt: skip


def _spelled(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _settle(board: Board, run: Run, code: int, say: Callable[[str], None]) -> None:
    loss = board.loss(run)
    if loss is not None and code == 0:
        say(f"{run.cell} {run.kind} seed {run.seed}: {board.study.metric} {loss:.4f}  {_told(board, run)}")
        return
    log = board.log(run).read_text("utf-8", "replace").strip().splitlines()
    why = "interrupted" if board.manifest(run).get("state") == "stopped" else "failed"
    line = log[-1] if log else f"exit code {code}"
    say(f"{run.cell} {run.kind} seed {run.seed}: {why} ({line})")
    if not board.can_go_on(run):
        _set_aside(board, run, why, line)


def _set_aside(board: Board, run: Run, why: str, line: str) -> None:
    folder = board.root / why
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{run.key}-{len(board.set_aside(run, why))}"
    directory = board.directory(run)
    if directory.exists():
        directory.rename(place)
    else:
        place.mkdir()
    (place / WHY).write_text(line + "\n", "utf-8")


def _told(board: Board, run: Run) -> str:
    common = {*board.study.options, "seed"}
    return ", ".join(f"{k} {v}" for k, v in run.options.items() if k not in common)
