"""Studies that are killed, shared, or left by a dead process: every run is done once, and none is lost."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoloco.study_board import Board
from isoloco.study_file import load
from isoloco.study_view import standings, status

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture
def tiny(shards, tmp_path, monkeypatch):
    """A study of six short runs, one of them to be tuned; in the current directory."""
    from tiny_models import config_file

    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(
        f"workers: 2\nglobal_batch_size: 4\nsync_every: 2\nbudget: {{steps: 4}}\ndata: {{path: {shards}}}\n"
        f"model: {{config: {config_file('llama', tmp_path)}, seq_len: 16}}\neval: {{tokens: 160}}\n"
        "checkpoint: {every_rounds: 1}\n"
    )

    def make(cells: str, **keys: str) -> Board:
        given = {"name": "try", "recipe": "small.yaml", "seeds": "[1, 2]", **keys}
        Path("try.yaml").write_text("".join(f"{k}: {v}\n" for k, v in given.items()) + f"cells: {cells}\n")
        return Board(load("try.yaml"), tmp_path / "studies")

    return make


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "isoloco", "study", "run", "try.yaml", *words]
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finished(board: Board) -> dict[str, int]:
    """How many finished runs there are of each key, wherever they lie."""
    found: dict[str, int] = {}
    for path in board.root.rglob("run.json"):
        if json.loads(path.read_text("utf-8"))["state"] == "finished":
            key = path.parent.name.partition("-")[0]
            found[key] = found.get(key, 0) + 1
    return found


def test_killed_five_times_shared_and_with_stale_claims(tiny):
    board = tiny("{a: {method: diloco}, b: {method: isoloco, tune: {outer.lr: [1.8, 1.0]}}}", trials="2")
    claims = board.root / "claims"
    claims.mkdir(parents=True)
    [first, second, *_] = board.wanted(board.study.cells[0])
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = {"host": socket.gethostname(), "pid": dead.pid, "study_pid": dead.pid, "heartbeat_s": time.time()}
    (claims / f"{first.key}.json").write_text(json.dumps(here))
    (claims / f"{second.key}.json").write_text(json.dumps({**here, "host": "elsewhere", "heartbeat_s": 0.0}))
    assert sum("which is gone" in line for line in status(board, "the command")) == 2
    moments = random.Random(7)
    for _ in range(5):
        process = start("--jobs", "2")
        time.sleep(moments.uniform(0.3, 4.0))
        process.kill()  # without a word: its runs go on alone, and keep their claims
        process.wait()
    both = [start(), start()]
    assert [process.wait(timeout=400) for process in both] == [0, 0]
    wanted = {run.key for _, run, _ in board.everything()}
    assert len(wanted) == 2 + 3  # the best of two trials is the first seed's report
    assert finished(board) == dict.fromkeys(wanted, 1)
    assert not list((board.root / "failed").glob("*"))
    assert not list(claims.glob("*.json"))
    assert sum(1 for row in board.rows()) == 2 + 2 + 2


def test_a_study_that_is_told_to_stop_saves_its_runs_and_goes_on(tiny):
    board = tiny("{a: {method: diloco, budget.steps: 4000, data.epochs: 100}}", seeds="[1]")
    [run] = board.wanted(board.study.cells[0])
    process = start()
    while not board.can_go_on(run):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 130
    assert board.manifest(run)["state"] == "stopped"
    assert board.can_go_on(run)
    assert standings(board)[0].running == []
    assert not list((board.root / "interrupted").glob("*"))


def test_what_fails_is_told_and_the_study_goes_on(tiny):
    """Numbers that are none, options that the run refuses, more memory than there is: one line each, and what to do."""
    board = tiny(
        "{nan: {inner.lr: 1e+39}, refused: {compute.device: cuda:99}, "
        "memory: {model.config: huge.json}, fine: {method: diloco}}",
        seeds="[1]",
    )
    config = json.loads(next(Path().glob("*.json")).read_text("utf-8"))
    Path("huge.json").write_text(json.dumps({**config, "hidden_size": 2**20, "intermediate_size": 2**24}))
    assert start("--jobs", "2").wait(timeout=400) == 1
    found = {cell.cell: cell for cell in standings(board)}
    assert [found[name].done for name in ("nan", "refused", "memory", "fine")] == [0, 0, 0, 1]
    told = {name: found[name].failed[0][1] for name in ("nan", "refused", "memory")}
    assert "no worker is left" in told["nan"]
    assert "cuda:99" in told["refused"]
    assert "memory" in told["memory"]
    lines = status(board, "isoloco study run try.yaml")
    assert all(any(line in each for each in lines) for line in told.values())
    assert lines[-1].endswith("isoloco study run try.yaml --retry")
    assert start().wait(timeout=200) == 1  # what failed twice is not tried again by itself
    assert board.forgive() == 6
    assert not any(cell.failed for cell in standings(board))
