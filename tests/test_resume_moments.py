"""Moments at which runs end, and how they go on: at the start, at the end, at an epoch's end, twice, from signals."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults import requeue_at
from isoloco import train
from isoloco.cli import main
from isoloco.config import RunConfig, flat
from isoloco.config import options as options_of
from isoloco.metrics import comparable, read_metrics
from isoloco.rundir import RunDir
from isoloco.saved import whole
from tiny_models import config_file, short_run


class Killed(BaseException):
    """Ends a training where it stands, as a kill does: nothing more is written by it."""


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    monkeypatch.setattr("isoloco.plots.overview", lambda run_dir: run_dir / "overview.png")


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("gpt2", tmp_path)  # with dropout

    ours = {"sync_every": 3, "micro_batch_size": 1}
    return lambda place, **dotted: short_run(tmp_path / place, shards, network, **{**ours, **dotted})


def killed_at(phase: str, number: int = 1):
    """An observer that ends the training at the n-th announcement of a phase."""
    heard = itertools.count(1)

    def observe(announced: str, **_: Any) -> None:
        if announced == phase and next(heard) == number:
            raise Killed

    return observe


def kill(config: RunConfig, phase: str, number: int = 1, **options: Any) -> Path:
    with pytest.raises(Killed):
        train(config, observe=killed_at(phase, number), **options)
    return Path(config.out_dir or "")


def assert_equal_runs(one: Path, other: Path) -> None:
    mine, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert comparable(read_metrics(one)) == comparable(read_metrics(other))
    held = [{path.name for path in run.iterdir()} for run in (one, other)]
    assert held[0] == held[1]
    assert not list((other / "checkpoints").glob(".*"))
    manifests = [json.loads((whole(run / "checkpoints")[-1] / "manifest.json").read_text()) for run in (one, other)]
    assert manifests[0]["files"] == manifests[1]["files"]  # a checksum each: optimizer states too
    assert manifests[0]["state"] == manifests[1]["state"]


@pytest.mark.parametrize("options", [{}, pytest.param({"compute__worker_state": "disk"}, marks=pytest.mark.slow)])
def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_place(options, make):
    one = train(make("whole", **options)).run_dir
    run = kill(make("killed", **options), "inner", 4)
    assert not whole(run / "checkpoints")
    result = train(make("killed", **options), resume="auto")
    assert result.run_dir == run
    assert_equal_runs(one, run)


def test_without_a_checkpoint_resume_says_which_command_starts_over(make, capsys):
    config = make("killed")
    run = kill(config, "inner", 2, command="isoloco train my.yaml")
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(run)]) == 2
    assert "isoloco train my.yaml --resume auto" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_of_two_runs_auto_takes_the_one_with_a_checkpoint(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make("", out_dir=None, name="mine")
    first = train(config, stop=requeue_at(9)).run_dir
    with pytest.raises(Killed):
        train(config, observe=killed_at("inner"))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine-1", "mine-2"]
    assert train(config, resume="auto").run_dir == first
    assert train(config, resume="auto").run_dir.name == "mine-2"  # the first has ended
    assert train(config, resume="auto").run_dir.name == "mine-3"


@pytest.mark.parametrize(
    "left",
    [pytest.param("nothing", marks=pytest.mark.slow), "a model", pytest.param("half a model", marks=pytest.mark.slow)],
)
def test_a_run_killed_after_its_last_step_comes_to_its_end(left, make):
    """Between the last checkpoint and the summary lie the model and a sample, which take their time."""
    one = train(make("whole")).run_dir
    run = train(make("killed")).run_dir
    ended = RunDir.open(run)
    summary = ended.manifest["summary"]
    ended.update(state="running", summary={})
    if left == "half a model":
        (run / "model").rename(run / ".model.partial")
    elif left == "nothing":
        shutil.rmtree(run / "model")
    result = train(make("killed"), resume=run)
    assert result.state == "finished"
    assert_equal_runs(one, run)
    assert {k: v for k, v in result.summary.items() if k[-2:] != "_s"} == {
        k: v for k, v in summary.items() if k[-2:] != "_s"
    }
    with pytest.raises(ValueError, match="used up"):
        train(make("killed"), resume=run)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["inner", "checkpoint"])
def test_a_run_killed_in_its_last_step_or_save_goes_on(phase, make):
    one = train(make("whole")).run_dir
    run = kill(make("killed"), phase, 16 if phase == "inner" else 3)  # 2 workers of 8 steps; 3 rounds
    train(make("killed"), resume=run)
    assert_equal_runs(one, run)


@pytest.mark.slow
def test_rows_come_once_an_epoch_across_a_resume_at_its_end(make, tmp_path):
    import numpy as np

    data = tmp_path / "short"
    data.mkdir()
    for split, rows in (("train", 18), ("valid", 8), ("test", 8)):  # an epoch of 4.5 steps of 4 rows
        tokens = np.random.default_rng(len(split)).integers(60, size=rows * 16)
        np.save(data / f"{split}_000000.npy", tokens.astype(np.uint16))
    options = {"data__path": str(data), "data__epochs": 3, "budget__steps": 12}
    one = train(make("whole", **options)).run_dir
    for moment in (8, 10, 11, 20):  # around the first epoch's end, in round 2, and the second's, in round 3
        run = kill(make(f"killed-{moment}", **options), "inner", moment)
        train(make(f"killed-{moment}", **options), resume="auto")
        assert_equal_runs(one, run)
        stopped = train(make(f"stopped-{moment}", **options), stop=requeue_at(moment)).run_dir
        train(make(f"stopped-{moment}", **options), resume=stopped)
        assert_equal_runs(one, stopped)


@pytest.mark.slow
def test_killed_stopped_and_killed_again(make):
    options = {"checkpoint__every_rounds": 2, "budget__steps": 14, "compute__worker_state": "disk"}
    one = train(make("whole", **options)).run_dir
    config = make("killed", **options)
    run = kill(config, "inner", 4)  # before the first checkpoint
    kill(config, "reduce", 3, resume="auto")  # in the third round, one round after it
    train(config, resume="auto", stop=requeue_at(2))  # in mid-round, by a signal
    kill(config, "outer", 2, resume="auto")
    kill(config, "eval", 2, resume="auto")
    assert train(config, resume="auto").state == "finished"
    assert_equal_runs(one, run)


def test_a_run_that_another_process_trains_is_left_alone(make):
    run = train(make("run"), stop=requeue_at(5)).run_dir
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    holder = RunDir.open(run)
    holder.claim()
    for how in (run, "auto"):
        with pytest.raises(ValueError, match="is training it"):
            train(make("run"), resume=how)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    holder.release()
    assert train(make("run"), resume=run).state == "finished"


def test_a_directory_in_which_a_run_was_about_to_begin_is_free(make, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "run.lock").touch()
    (place / ".run.json.123").write_text("{")
    assert train(make("run"), resume="auto").state == "finished"
    assert not (place / ".run.json.123").exists()


@pytest.mark.slow
def test_half_of_a_removed_checkpoint_counts_as_none(make):
    """What a process that died at removing an old checkpoint, or at writing one, has left is never gone on from."""
    run = train(make("run"), stop=requeue_at(12)).run_dir
    newest = whole(run / "checkpoints")[-1]
    for hidden in (".r000009.removed", ".r000009.partial"):
        shutil.copytree(newest, run / "checkpoints" / hidden)
        (run / "checkpoints" / hidden / "outer.safetensors").unlink()
    assert whole(run / "checkpoints")[-1] == newest
    assert train(make("run"), resume="auto").state == "finished"
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_dropped_worker_leaves_no_file_on_the_shelf(make):
    """And neither does a process that died: each worker has one file, and none when the run has ended."""
    config = make("run", compute__worker_state="disk", inner__lr=1e39, budget__steps=6)
    counts = []

    def observe(phase: str, **_: Any) -> None:
        if phase == "inner":
            counts.append(len(list((Path(config.out_dir or "") / "workers").iterdir())))

    with pytest.raises(ValueError, match="no worker is left"):
        train(config, observe=observe)
    assert max(counts) <= 2
    assert not (Path(config.out_dir or "") / "workers").exists()
    later = make("later", compute__worker_state="disk")
    run = kill(later, "inner", 9)
    assert not (run / "workers").exists()  # Killed is caught here; SIGKILL leaves them
    (run / "workers").mkdir()
    for name in ("0-3-0", "1-3-1", "0-9-7"):
        (run / "workers" / f"{name}.safetensors").write_bytes(b"of a process that was killed")
    counts.clear()
    train(later, resume=run, observe=lambda phase, **_: counts.append(len(list((run / "workers").iterdir()))))
    assert max(counts) == 2
    assert not (run / "workers").exists()


@pytest.mark.slow
def test_a_signal_in_mid_round_loses_nothing(make):
    """Through the command: SIGTERM saves within one step, the same command goes on."""
    options = {"budget__steps": 90, "sync_every": 30, "data__epochs": 100, "checkpoint__every_rounds": 3}
    one = train(make("whole", **options)).run_dir
    config = make("stopped", **options)
    run = Path(config.out_dir or "")
    known = options_of()
    values = {key: value for key, value in flat(config).items() if value != known[key].default}
    argv = [
        f"--{key}={json.dumps(value) if isinstance(value, dict | list) else value}" for key, value in values.items()
    ]
    command = [sys.executable, "-m", "isoloco", "train", *argv, "--resume", "auto"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_metrics(run)) < 35:  # the second worker's turn
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    [saved] = whole(run / "checkpoints")
    assert "-w001-s" in saved.name
    assert main(["train", *argv, "--resume", "auto"]) == 0
    assert_equal_runs(one, run)
