"""The examples of loops that exist, run as they are: plain, accelerate, Trainer, torchft; two processes each."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import toy
from forked import free_port, together

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(work: Callable[[], Any], place: Path) -> list[str]:
    """What ``work`` prints in each of two processes."""
    place.mkdir()

    def run(rank: int) -> str:
        import warnings

        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries; their users see them as well
            work()
        return out.getvalue()

    return together(2, run, place, timeout_s=240)


def test_plain_loop_by_torchrun_and_resumed(tmp_path: Path) -> None:
    lines = (EXAMPLES / "plain_loop.py").read_text().splitlines()
    assert len(lines) < 80
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        str(EXAMPLES / "plain_loop.py"), "--steps", "45", "--state", str(tmp_path / "straight"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "after 2 rounds" in done.stdout
    main = example("plain_loop").main
    printed(lambda: main(33, 20, str(tmp_path / "stopped"), False), tmp_path / "first")  # in mid-round
    printed(lambda: main(45, 20, str(tmp_path / "stopped"), True), tmp_path / "second")
    for rank in range(2):
        straight, stopped = (torch.load(tmp_path / d / f"worker{rank}.pt") for d in ("straight", "stopped"))
        toy.assert_same(straight, stopped)


def test_plain_loop_learns(tmp_path: Path) -> None:
    told = printed(lambda: example("plain_loop").main(600, 20, str(tmp_path / "state"), False), tmp_path / "run")
    assert float(told[0].partition("accuracy ")[2].split()[0]) > 0.95


def test_accelerate_loop(tmp_path: Path) -> None:
    told = printed(lambda: example("accelerate_loop").main(10, 16, True, 2), tmp_path / "run")
    assert told[0].startswith("2 workers, 20 rounds")
    assert float(told[0].split()[-1]) > 0.95
    assert told[1] == ""


def test_trainer_is_a_worker_and_goes_on_in_mid_round(tmp_path: Path) -> None:
    main = example("trainer_loop").main
    straight = printed(lambda: main(str(tmp_path / "a"), 13, 5, 100, False), tmp_path / "straight")
    printed(lambda: main(str(tmp_path / "b"), 8, 5, 4, False), tmp_path / "stopped")
    resumed = printed(lambda: main(str(tmp_path / "b"), 13, 5, 4, True), tmp_path / "resumed")
    for rank, (one, other) in enumerate(zip(straight, resumed, strict=True)):
        last, again = one.splitlines()[-1], other.splitlines()[-1]
        assert last == again
        assert last.startswith(f"worker {rank} of 2: 2 rounds, loss ")


def test_torchft_loop(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "torchft_loop.py"), "--rounds", "4", "--sync-every", "10"],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("replica"))
    assert first == second
    assert first.startswith("3 matrices by Iso-C, accuracy ")
