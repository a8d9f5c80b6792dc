"""Claims: which process has a run of a study. A lock where the file system has them, and a card that says who.

The lock is handed to the run's own process too, and lasts as long as either lives: a run whose study was killed is left
alone until it ends. On other hosts, where a process cannot be looked for, a card counts while its heartbeat is young.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rundir import write_whole

if TYPE_CHECKING:
    from filelock import BaseFileLock

BEAT_EVERY_S = 5.0
STALE_AFTER_S = 120.0


@dataclass
class Claim:
    """A run that this process has."""

    path: Path
    lock: BaseFileLock | None
    card: dict[str, Any]

    @property
    def handles(self) -> tuple[int, ...]:
        """File descriptors with which a child process holds the claim too."""
        handle = self.lock._context.lock_file_fd if self.lock is not None else None  # filelock has no public name
        return () if handle is None else (handle,)

    def beat(self, **fields: Any) -> None:
        """Say that it is alive, every few seconds at most, or what is new about it."""
        if fields or time.time() - self.card["heartbeat_s"] >= BEAT_EVERY_S:
            self.card |= fields | {"heartbeat_s": time.time()}
            write_whole(self.path, json.dumps(self.card) + "\n")

    def release(self) -> None:
        """Let others have it."""
        self.path.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()


def take(root: Path, key: str) -> Claim | None:
    """Claim a run; None where another process has it."""
    from filelock import FileLock, Timeout

    folder = root / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    lock: BaseFileLock | None = FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except NotImplementedError:  # a file system without locks: the card alone decides
        lock = None
    card = read_card(path)
    elsewhere = card and (lock is None or card["host"] != socket.gethostname())  # some locks do not reach other hosts
    if elsewhere and is_alive(card):
        if lock is not None:
            lock.release()
        return None
    claim = Claim(path, lock, {"host": socket.gethostname(), "study_pid": os.getpid(), "heartbeat_s": 0.0})
    claim.beat()
    return claim


def forget(root: Path, keys: Iterable[str]) -> None:
    """Remove the cards of runs that have ended alone, after their study was killed."""
    for key in keys:
        (root / "claims" / f"{key}.json").unlink(missing_ok=True)


def read_card(path: Path) -> dict[str, Any]:
    """Host, pid of the run, pid of its study and heartbeat; empty where there is none."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def is_alive(card: dict[str, Any]) -> bool:
    """Whether the run of a card, or its study, is still there, as far as this host can tell."""
    if card["host"] != socket.gethostname():
        return time.time() - card["heartbeat_s"] < STALE_AFTER_S
    return any(_runs(card[name]) for name in ("pid", "study_pid") if name in card)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
