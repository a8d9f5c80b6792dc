"""Runs that survive: what a checkpoint holds, and that a run gone on with ends as the one that never stopped."""

import json
import os
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
from isoloco.metrics import comparable, read_metrics
from tiny_models import config_file, short_run

METHODS = [
    "isoloco",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("dp", "ties", "dare", "iso_cts", "isoloco_muon")),
]
HARMS = ["flip", *(pytest.param(harm, marks=pytest.mark.slow) for harm in ("cut", "remove"))]


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("gpt2", tmp_path)  # with dropout

    ours = {"workers": 3, "sync_every": 4, "global_batch_size": 6, "micro_batch_size": 1, "budget__steps": 10}
    return lambda name, **dotted: short_run(tmp_path / name, shards, network, **{**ours, **dotted})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def told(run: Path) -> list[dict[str, Any]]:
    """The run's records, all of them: a resumed run is told as one that never stopped."""
    return comparable(read_metrics(run))


def assert_equal_runs(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert told(one) == told(other)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(method, make):
    whole = train(make("whole", method=method)).run_dir
    # in the first turn, in a later turn of the first round, in mid-round of the second, twice in one run
    for moments in [(2,), (6,), (17,), (3, 5)] if method != "dp" else [(2,), (6,), (3, 4)]:
        name = "-".join(map(str, moments))
        train(make(name, method=method), stop=requeue_at(moments[0]))
        run = Path(make(name).out_dir or "")
        for moment in moments[1:]:
            train(make(name, method=method), resume=run, stop=requeue_at(moment))
        result = train(make(name, method=method), resume=run)
        assert result.state == "finished"
        assert_equal_runs(whole, run)


@pytest.mark.parametrize("options", [{"comm__wire": "int8"}, {"compute__worker_state": "disk"}])
def test_codec_errors_and_states_on_disk_come_back(options, make):
    whole = train(make("whole", **options)).run_dir
    stopped = train(make("stopped", **options), stop=requeue_at(18))
    assert stopped.state == "stopped"
    assert stopped.stopped_by == "requeue"
    train(make("stopped", **options), resume=stopped.run_dir)
    assert_equal_runs(whole, stopped.run_dir)


def test_states_on_disk_change_nothing(make):
    at_hand = train(make("hand")).run_dir
    on_disk = train(make("disk", compute__worker_state="disk")).run_dir
    assert_equal_runs(at_hand, on_disk)


def test_what_is_kept_and_what_is_linked(make):
    run = train(make("run", checkpoint__keep_last=2)).run_dir
    folder = run / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["r000002", "r000003"]
    manifest = json.loads((folder / "r000003" / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        assert (folder / "r000003" / name).stat().st_size == entry["bytes"]
    # transformers loads the anchor, and it is the run's model
    final = weights(run)
    anchor = load_file(folder / "r000003" / "anchor" / "model.safetensors")
    assert all(torch.equal(final[name], anchor[name]) for name in final)


@pytest.mark.parametrize("where", ["device", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_save_in_mid_round_writes_only_who_has_run_since(where, make):
    config = make("run", compute__worker_state=where)
    # round 2 begins with the 13th question; worker 0 ends its turn with the 16th
    train(config, stop=requeue_at(18))
    folder = Path(config.out_dir or "") / "checkpoints"
    before, middle = sorted(folder.iterdir())
    same = [
        os.path.samefile(before / "workers" / f"{i}.safetensors", middle / "workers" / f"{i}.safetensors")
        for i in range(3)
    ]
    assert same == [False, False, True]
    assert os.path.samefile(before / "anchor" / "model.safetensors", middle / "anchor" / "model.safetensors")


def test_nothing_on_disk_is_a_pickle(make):
    run = train(make("run", compute__worker_state="disk")).run_dir
    kinds = {path.suffix for path in run.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".png", ".txt", ".jinja", ".lock"}


def test_the_budget_may_grow_and_results_may_not_change(make):
    run = train(make("run", budget__steps=8)).run_dir
    longer = train(make("run", budget__steps=14), resume=run)
    assert longer.state == "finished"
    assert longer.rounds[-1]["step"] == 14
    with pytest.raises(ValueError, match=r"inner.lr .* -> 0.5"):
        train(make("run", budget__steps=20, inner__lr=0.5), resume=run)
    with pytest.raises(ValueError, match="used up"):
        train(make("run", budget__steps=14), resume=run)


def test_logging_and_evaluation_may_change(make):
    config = make("run")
    train(config, stop=requeue_at(7))
    result = train(make("run", log__every_steps=5, eval__every_rounds=0), resume=config.out_dir)
    assert [e["round"] for e in result.evaluations] == [3]


def test_resume_auto_goes_on_or_starts(make):
    config = make("run")
    first = train(config, resume="auto", stop=requeue_at(7))
    assert first.state == "stopped"
    second = train(config, resume="auto")
    assert second.state == "finished"
    assert second.run_dir == first.run_dir


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", ["workers/1.safetensors", "outer.safetensors", "anchor/model.safetensors"])
def test_damage_is_told_by_file_and_the_checkpoint_before_serves(harm, file, make, capsys):
    run = train(make("run", budget__steps=8)).run_dir
    victim = run / "checkpoints" / "r000002" / file
    content = bytearray(victim.read_bytes())
    victim.unlink()  # a hard link may stand elsewhere too
    if harm == "flip":
        content[len(content) // 2] ^= 1
    if harm != "remove":
        victim.write_bytes(content if harm == "flip" else content[:-5])
    assert main(["train", "--resume", str(run), "--budget.steps", "12"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(victim) in error
    assert "--resume-from-previous" in error
    assert main(["train", "--resume", str(run), "--resume-from-previous", "--budget.steps", "12"]) == 0


def test_a_shard_that_changed_is_told(make, shards, tmp_path):
    import shutil

    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    config = make("run", data__path=str(copy))
    train(config, stop=requeue_at(7))
    shard = next(copy.glob("train_*.npy"))
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=shard.name):
        train(config, resume=config.out_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_signals_save_and_say_how_to_go_on(sent, code, make, tmp_path):
    config = make("run", budget__steps=4000)
    argv = [sys.executable, "-m", "isoloco", "train"]
    for key in (
        "model.config",
        "model.seq_len",
        "data.path",
        "workers",
        "sync_every",
        "global_batch_size",
        "budget.steps",
    ):
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        argv.append(f"--{key}={value}")
    argv.append("--data.epochs=1000")
    process = subprocess.Popen(
        [*argv, f"--out_dir={config.out_dir}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    metrics = Path(config.out_dir or "") / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and '"round"' in metrics.read_text()):
        time.sleep(0.1)
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert list((Path(config.out_dir or "") / "checkpoints").iterdir())
    assert main(["train", "--resume", str(config.out_dir), "--workers", "5"]) == 2
