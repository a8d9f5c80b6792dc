"""Real training processes that start in milliseconds, for others to kill: forked from one that has trained before.

Imports take seconds, a tiny training one; so one process (`Nursery`) imports everything, trains once, and forks a
process for each training that is asked for. Every training appends the phases that it goes through to a file, line by
line, without a buffer: what a process has written there outlives it, however it dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
# threads do not survive a fork, so there must be none; a GPU does not either
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Line:
    """A phase that a training announced, and when (seconds since 1970). The first is "begin", the last one "end"."""

    phase: str
    time: float
    info: dict[str, int]


@dataclass(frozen=True)
class Job:
    """A training: options by dotted name, the file of its phases, and the file of what it prints.

    ``elastic``: worker and lighthouse, where it is one of several processes.
    """

    options: dict[str, Any]
    phases: Path
    printed: Path
    elastic: dict[str, Any] | None = None

    def read(self) -> list[Line]:
        """The phases so far; a line that was torn is left out."""
        text = self.phases.read_text("utf-8") if self.phases.exists() else ""
        return [Line(*json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Nursery:
    """Starts trainings, each ``train(config, resume="auto")`` or ``train_elastic``, as a scheduler would."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.victims"],
            cwd=ROOT, env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        with self._process as process:
            process.stdin.close()  # type: ignore[union-attr]

    def here(self, job: Job) -> None:
        """Train in the nursery itself; RuntimeError where that fails. The first time takes its imports' seconds."""
        self._ask("here", job)

    def load(self, *modules: str) -> None:
        """Import what the trainings will need beside what ``here`` needs."""
        self._ask("load", list(modules))

    def start(self, job: Job) -> int:
        """Begin a training in a process of its own, and return its id, which stays its own until `wait`."""
        return self._ask("start", job)

    def wait(self, process: int) -> int:
        """How a process ended: its exit code, or minus the signal that killed it."""
        return self._ask("wait", process)

    def _ask(self, what: str, argument: Job | int | list[str]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        told = vars(argument) if isinstance(argument, Job) else argument
        self._process.stdin.write(json.dumps([what, told], default=str) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.strip().lstrip("-").isdecimal():
            raise RuntimeError(f"{what} {told}: the nursery failed: {answer.strip() or 'it ended'}")
        return int(answer)


def serve(requests: Iterator[str], answer: Callable[[str], None]) -> None:
    """The nursery's side of its pipes."""
    for request in requests:
        what, told = json.loads(request)
        if what == "wait":
            answer(str(os.waitstatus_to_exitcode(os.waitpid(told, 0)[1])))
            continue
        if what == "load":
            for module in told:
                importlib.import_module(module)
            answer("0")
            continue
        job = Job(told["options"], Path(told["phases"]), Path(told["printed"]), told["elastic"])
        if what == "here":
            _train(job)
            gc.collect()
            gc.freeze()  # what is never collected is never written to, and stays shared after a fork
            threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["one"]
            answer("0" if len(threads) == 1 else f"{len(threads)} threads would not survive a fork")
            continue
        process = os.fork()
        if process == 0:
            train_and_exit(job)
        answer(str(process))


def train_and_exit(job: Job) -> None:
    """The whole life of a forked process."""
    code = 1
    try:
        printed = os.open(job.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        _train(job)
        code = 0
    except BaseException:  # whatever it was: this process ends here, and never goes on as a second nursery
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _train(job: Job) -> None:
    from isoloco.config import from_flat
    from isoloco.train import train

    file = os.open(job.phases, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def observe(phase: str, **info: Any) -> None:
        numbers = {name: value for name, value in info.items() if isinstance(value, int)}
        os.write(file, (json.dumps([phase, time.time(), numbers]) + "\n").encode())

    try:
        observe("begin")
        if job.elastic is None:
            train(from_flat(job.options), resume="auto", observe=observe)
        else:
            from isoloco.elastic import train_elastic

            train_elastic(from_flat(job.options), **job.elastic, observe=observe)
        observe("end")
    finally:
        os.close(file)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def tell(text: str) -> None:
        answers.write(text + "\n")
        answers.flush()

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(sys.stdin, tell)
