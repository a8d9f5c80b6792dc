"""Studies: a named set of runs that fills one table or figure.

A study is a YAML file of cells. A cell has options over a recipe, and may have axes to be tuned: its trials climb from
a start along ladders, one axis after the other, until no neighbour of the best is better, and go on around it up to
the study's number of trials, the same for every cell. The best is then run for every seed.

The run directory is the truth: a run is keyed by the hash of its options, claimed by a file lock, and is a subprocess
of its own. So a study can be stopped and started, by several processes at once; what is done is not done again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .study_board import Board, Run
from .study_file import load as load  # a study is loaded, laid out on a board, and run


def run_study(
    board: Board,
    *,
    jobs: int = 1,
    threads: int | None = None,
    say: Callable[[str], None] = print,
    rows: Path | None = None,
) -> bool:
    """Run what is left, ``jobs`` at a time; several processes may do so at once. False if a run failed for good."""
    board.root.mkdir(parents=True, exist_ok=True)
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    active: dict[str, tuple[Run, subprocess.Popen[bytes], Any]] = {}
    while True:
        for key, (run, process, lock) in list(active.items()):
            if process.poll() is not None:
                _settle(board, run, process.returncode, say)
                lock.release()
                del active[key]
                if rows:
                    board.write_rows(rows)
        wanted = [run for cell in board.study.cells for run in board.wanted(cell)]
        for run in wanted:
            if len(active) >= jobs:
                break
            if run.key not in active and (lock := _claim(board, run)) is not None:
                if board.loss(run) is not None:  # somebody else finished it in between
                    lock.release()
                    continue
                active[run.key] = (run, _start(board, run, threads), lock)
                say(f"{run.cell} {run.kind} seed {run.seed}: {_told(board, run)}")
        if not active and not wanted:
            break
        time.sleep(1.0)
    if rows:
        board.write_rows(rows)
    return not any(board.failed(run) for _, run, _ in board.everything())


def _claim(board: Board, run: Run) -> Any | None:
    """The run's file lock, or None where another process has it."""
    from filelock import FileLock, Timeout

    folder = board.root / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{run.key}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _start(board: Board, run: Run, threads: int) -> subprocess.Popen[bytes]:
    """Start a run as a process of its own. What a dead process left in its directory is moved away first."""
    directory = board.directory(run)
    if directory.exists():
        _set_aside(board, run, "interrupted")
    logs = board.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.executable,
        "-m",
        "isoloco",
        "train",
        board.study.recipe,
        f"--out_dir={directory}",
        f"--compute.threads={threads}",
    ]
    argv += [f"--{key}={_spelled(value)}" for key, value in run.options.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (logs / f"{run.key}.log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)


def _spelled(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _settle(board: Board, run: Run, code: int, say: Callable[[str], None]) -> None:
    loss = board.loss(run)
    if loss is not None and code == 0:
        say(f"{run.cell} {run.kind} seed {run.seed}: {board.study.metric} {loss:.4f}  {_told(board, run)}")
        return
    log = (board.root / "logs" / f"{run.key}.log").read_text("utf-8", "replace").strip().splitlines()
    why = "interrupted" if board.manifest(run).get("state") == "stopped" else "failed"
    say(f"{run.cell} {run.kind} seed {run.seed}: {why} ({log[-1] if log else f'exit code {code}'})")
    _set_aside(board, run, why)


def _set_aside(board: Board, run: Run, why: str) -> None:
    folder = board.root / why
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{run.key}-{len(board.set_aside(run, why))}"
    directory = board.directory(run)
    if directory.exists():
        directory.rename(place)
    else:
        place.mkdir()


def _told(board: Board, run: Run) -> str:
    common = {*board.study.options, "seed"}
    return ", ".join(f"{k} {v}" for k, v in run.options.items() if k not in common)
