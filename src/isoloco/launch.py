"""What belongs to one launch of a training and not to its config: resuming, signals, exit codes, a trace."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# by what stopped the run; 75 is EX_TEMPFAIL of sysexits.h: try again later
EXIT_CODES = {"": 0, "interrupt": 130, "requeue": 75}


def launch_flags(argv: list[str]) -> tuple[list[str], str | None, bool]:
    """What is about this launch and no option of the run, taken out of the arguments."""
    rest: list[str] = []
    resume: str | None = None
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        if token == "--resume" or token.startswith("--resume="):
            resume = token.partition("=")[2] or (queue.pop(0) if queue else "")
            if not resume or resume.startswith("--"):
                raise ValueError("--resume needs a run directory, or auto")
        elif token != "--resume-from-previous":
            rest.append(token)
    previous = "--resume-from-previous" in argv
    if previous and resume in (None, "auto"):
        raise ValueError("--resume-from-previous goes with --resume RUN_DIR")
    return rest, resume, previous


def profile_flag(argv: list[str]) -> tuple[list[str], bool]:
    """Whether the second round of this launch is to be traced, taken out of the arguments."""
    return [token for token in argv if token != "--profile"], "--profile" in argv


def elastic_flags(argv: list[str]) -> tuple[list[str], dict[str, Any] | None]:
    """What makes this process an elastic worker, taken out of the arguments; None where it is none."""
    rest: list[str] = []
    given: dict[str, str] = {}
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        flag, equals, value = token.partition("=")
        if flag in ("--worker-id", "--lighthouse"):
            given[flag] = value if equals else (queue.pop(0) if queue else "")
            if not given[flag] or given[flag].startswith("--"):
                raise ValueError(f"{flag} needs a value")
        elif token != "--elastic":
            rest.append(token)
    if "--elastic" not in argv:
        if given:
            raise ValueError(f"{next(iter(given))} goes with --elastic")
        return rest, None
    if any(token.partition("=")[0] in ("--resume", "--resume-from-previous") for token in rest):
        raise ValueError("--elastic goes on by itself from its worker's run directory: leave --resume out")
    if not given.get("--worker-id", "").isdecimal():
        raise ValueError("--elastic needs --worker-id N, from 0 to workers - 1, and the same one after a restart")
    lighthouse = given.get("--lighthouse") or os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not lighthouse:
        raise ValueError("--elastic needs --lighthouse HOST:PORT, or TORCHFT_LIGHTHOUSE (start it: torchft_lighthouse)")
    return rest, {"worker": int(given["--worker-id"]), "lighthouse": lighthouse}


class Interrupts:
    """From the first step on, Ctrl-C asks the run to save and end, and so do SIGTERM and SIGUSR1, to be requeued.

    A second Ctrl-C, or a signal before the first step, leaves at once.
    """

    HEARD = ("SIGINT", "SIGTERM", "SIGUSR1")

    def __init__(self) -> None:
        self._watching, self._asked = False, ""
        self._numbers = [getattr(signal, name) for name in self.HEARD if hasattr(signal, name)]
        self._before = {number: signal.getsignal(number) for number in self._numbers}

    def __enter__(self) -> Interrupts:
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> str:
        """Whether to end, and how: the training asks before every step."""
        if not self._watching:
            for number in self._numbers:
                signal.signal(number, self._hear)
            self._watching = True
        return self._asked

    def _hear(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            self._asked = "interrupt"
            signal.signal(signal.SIGINT, signal.default_int_handler)
            told = b"\nisoloco: saving and ending with what there is; Ctrl-C again leaves at once\n"
        else:
            self._asked = "requeue"
            told = b"\nisoloco: saving, to be gone on with: --resume auto\n"
        os.write(2, told)  # print may be interrupted


@contextlib.contextmanager
def traced(path: Path) -> Iterator[None]:
    """What torch's profiler sees inside, written as a trace that chrome://tracing and ui.perfetto.dev show."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        yield
    seen.export_chrome_trace(str(path))
