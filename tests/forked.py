"""Groups of real processes (gloo) for tests: forked, so that each is there in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(processes: int, work: Callable[[int], Any], place: Path, *, timeout_s: float = 120) -> list[Any]:
    """``work(rank)`` in so many processes, set up as torchrun does; what each returned. A failure fails the test."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=_child, args=(rank, work, place, environment), daemon=True) for rank in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout_s)
    stuck = [rank for rank, child in enumerate(children) if child.is_alive()]
    for child in children:
        child.kill()
    assert not stuck, f"ranks {stuck} of {processes} were not done in {timeout_s} s"
    found, failed = [], []
    for rank, child in enumerate(children):
        path = place / f"{rank}.pickle"
        value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, f"exit code {child.exitcode}")
        found.append(value)
        if error is not None:
            failed.append(f"rank {rank}:\n{error}")
    assert not failed, "\n".join(failed)
    return found


def _child(rank: int, work: Callable[[int], Any], place: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    value, error = None, None
    try:
        value = work(rank)
    except BaseException:
        error = traceback.format_exc()
    partial = place / f".{rank}"
    partial.write_bytes(pickle.dumps((value, error)))
    partial.rename(place / f"{rank}.pickle")
    os._exit(0)
