"""The run directory, metrics.jsonl, and going on after a stop."""

import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import no_file_larger_than
from isoloco import rundir
from isoloco.config import LogConfig, RunConfig, from_flat, identity, to_dict
from isoloco.metrics import Metrics, record
from isoloco.tracking import RunDir, check_extras, comparable, read_metrics
from told import ROUNDS, H, W, config, play, tracker

# The directory


def test_runs_started_at_once_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        paths = {d.path for d in pool.map(lambda _: RunDir.create(RunConfig(name="a")), range(24))}
    assert {p.name for p in paths} == {f"a-{n}" for n in range(1, 25)}
    assert RunDir.create(RunConfig(name="b")).path == tmp_path / "runs" / "b-1"
    assert RunDir.create(RunConfig(name="a")).path == tmp_path / "runs" / "a-25"


def test_an_explicit_directory_is_taken_only_when_it_is_empty(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "new" / "run"))
    with pytest.raises(ValueError, match=r"holds a run.*--resume"):
        RunDir.create(config(run_dir.path))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"not empty \(it holds thesis.txt\)"):
        RunDir.create(config(tmp_path / "full"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made or read"):
        RunDir.create(config(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert RunDir.create(config(tmp_path / "empty")).path == tmp_path / "empty"


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "/abs"])
def test_a_name_cannot_leave_the_directory_of_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="plain file name"):
        RunDir.create(RunConfig(name=name))
    assert not list(tmp_path.iterdir())


def test_the_manifest_says_what_runs_where(tmp_path):
    conf = config(tmp_path / "r")
    made = RunDir.create(conf, data_checksum="abc")
    made.update(parameters=7, summary={"valid_loss_best": math.nan})
    found = RunDir.open(tmp_path / "r").manifest
    assert found["state"] == "running"
    assert found["pid"] == os.getpid()
    assert found["identity"] == identity(conf, data_checksum="abc")
    assert (found["parameters"], found["summary"]) == (7, {"valid_loss_best": None})
    assert sorted(p.name for p in made.path.iterdir()) == ["run.json", "run.lock"]


def test_a_reader_never_sees_half_a_manifest(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "r"))

    def write():
        for i in range(60):
            run_dir.update(padding="x" * (i * 97 % 5000))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            assert RunDir.open(run_dir.path).manifest["state"] == "running"
        writing.result()


def test_opening_what_is_no_run_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        RunDir.open(tmp_path)
    for text in ("", "{", "[]", "{}"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json is not") as error:
            RunDir.open(tmp_path)
        assert "\n" not in str(error.value)


def test_config_yaml_reads_back_and_says_where_values_came_from(tmp_path):
    conf = config(tmp_path / "r")
    run_dir = RunDir.create(conf)
    run_dir.write_config(
        to_dict(conf), {"workers": "recipe quickstart", "seed": "recipe quickstart", "name": "a\nb: 1"}
    )
    text = (run_dir.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == to_dict(conf)
    assert "#   recipe quickstart: workers, seed\n" in text


def test_the_heartbeat_beats_at_most_once_in_its_time(tmp_path, monkeypatch):
    run_dir = RunDir.create(config(tmp_path / "r"))
    before = (run_dir.path / "run.json").read_bytes()
    run_dir.heartbeat()
    assert (run_dir.path / "run.json").read_bytes() == before
    monkeypatch.setattr(rundir, "HEARTBEAT_EVERY_S", 0.0)
    run_dir.heartbeat()
    assert json.loads((run_dir.path / "run.json").read_text())["heartbeat_s"] > json.loads(before)["heartbeat_s"]


# Metrics


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


numbers = st.floats(width=64)
values = st.recursive(
    numbers | st.integers(-(2**63), 2**63) | st.text() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc.[]", min_size=1), inner, max_size=4),
    max_leaves=12,
)


@given(values)
@settings(max_examples=40, deadline=None)
def test_any_numbers_make_valid_json_and_come_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.unlink(missing_ok=True)
    metrics = Metrics(path)
    assert metrics.append(record("any", {"round": 1, "step": 1, "value": value})) is None
    metrics.close()
    (line,) = path.read_text("utf-8").removesuffix("\n").split("\n")
    strict(line)
    (found,) = read_metrics(path)
    assert repr(found["value"]) == repr(value)  # repr: nan is not equal to itself


def test_tensors_and_numpy_numbers_are_written_as_numbers(tmp_path):
    import numpy as np
    import torch

    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append(
        record("any", {"step": np.int64(3), "a": torch.tensor(0.5), "b": np.float32("nan"), "c": torch.ones(2)})
    )
    metrics.close()
    (found,) = read_metrics(tmp_path)
    assert (found["step"], found["a"], found["c"]) == (3, 0.5, [1.0, 1.0])
    assert math.isnan(found["b"])


def test_the_order_of_fields_is_fixed(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        play(t, last=1)
        t.event("checkpoint", round=1, step=5, path="x")
    names = {r["kind"]: list(r) for r in read_metrics(run_dir.path)}
    assert names["inner"] == ["kind", "round", "step", "worker", "loss", "grad_norm", "lr", "tokens", "at_s"]
    assert names["eval"][2:] == ["step", "tokens", "split", "loss", "perplexity", "bits_per_byte", "eval_s", "at_s"]
    assert names["round"][:6] == ["kind", "round", "step", "tokens", "train_loss", "train_loss_spread"]
    assert names["checkpoint"] == ["kind", "round", "step", "path", "at_s"]


def test_a_file_torn_anywhere_in_its_last_line_reads_up_to_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "inner", "step": s}).encode() + b"\n" for s in (1, 2)]
    for end in range(len(lines[1]) - 1):
        path.write_bytes(lines[0] + lines[1][:end])
        assert [r["step"] for r in read_metrics(path)] == [1]
    path.write_bytes(lines[0] + b"\0" * 40)  # as some file systems leave it after a power cut
    assert [r["step"] for r in read_metrics(path)] == [1]
    path.write_bytes(b"{broken}\n" + lines[1])
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not JSON"):
        read_metrics(path)
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_each_record_is_in_the_file_as_soon_as_it_was_told(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        for step in (1, 2, 3):
            t.inner(round=1, step=step, worker=0, loss=1.0, grad_norm=1.0, lr=1.0, tokens=step)
            assert len(read_metrics(run_dir.path)) == step == t.records


def test_equal_runs_differ_only_in_fields_that_end_in_s(tmp_path):
    found = []
    for slow in (1.0, 3.0):
        run_dir = RunDir.create(config(tmp_path / f"r{slow}"))
        with tracker(run_dir, config(run_dir.path), quiet=True) as t:
            play(t, slow=slow)
        found.append(read_metrics(run_dir.path))
    assert comparable(found[0]) == comparable(found[1])
    assert found[0] != found[1]
    assert [list(r) for r in found[0]] == [list(r) for r in found[1]]


def test_a_disk_that_is_full_for_a_while_ends_no_run_and_loses_no_record(tmp_path, capsys):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        play(t, last=1)
        size = (run_dir.path / "metrics.jsonl").stat().st_size
        with no_file_larger_than(size + 70):  # room for half a line
            play(t, first=2, last=2)
        assert "warning: metrics.jsonl cannot be written (File too large)" in capsys.readouterr().err
        play(t, first=3)
        told = t.records
    found = read_metrics(run_dir.path)
    assert len(found) == told
    assert [r["step"] for r in found if r["kind"] == "eval"] == [5, 10, 15, 20]
    for line in (run_dir.path / "metrics.jsonl").read_text().splitlines():
        strict(line)


# Going on


def test_after_a_stop_the_records_are_those_of_the_run_that_was_not_stopped(tmp_path):
    whole = RunDir.create(config(tmp_path / "whole"))
    with tracker(whole, config(whole.path), quiet=True) as t:
        play(t)
        expected = t.figures()
    killed = RunDir.create(config(tmp_path / "killed"))
    first = tracker(killed, config(killed.path), quiet=True)
    play(first, last=2)
    checkpoint = first.records
    play(first, first=3, last=3)
    first.close()
    with (killed.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "inner", "ro')

    again = RunDir.open(killed.path)
    again.update(state="failed", error="killed")
    with tracker(again, config(killed.path), quiet=True, resume=True) as t:
        t.truncate(2 * H, records=checkpoint)
        play(t, first=3)
        got = t.figures()
    assert again.manifest["state"] == "running"
    assert again.manifest["error"] is None
    assert comparable(read_metrics(killed.path)) == comparable(read_metrics(whole.path))
    assert comparable(got) == comparable(expected)
    assert got["valid_loss_best_step"] == 2 * H


def test_truncating_by_the_step_alone_keeps_what_came_before(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        play(t)
        t.truncate(7)
        assert max(r["step"] for r in read_metrics(run_dir.path)) == 7
        t.event("checkpoint", round=2, step=7)
    assert read_metrics(run_dir.path)[-1]["kind"] == "checkpoint"


@pytest.mark.parametrize(
    ("error", "state", "told"),
    [
        (RuntimeError("first\nsecond"), "failed", "RuntimeError: first"),
        (ValueError("bad batch"), "failed", "bad batch"),
        (KeyboardInterrupt(), "stopped", None),
    ],
)
def test_an_exception_leaves_its_mark_in_the_manifest(tmp_path, error, state, told):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with pytest.raises(type(error)), tracker(run_dir, config(run_dir.path), quiet=True):
        raise error
    found = RunDir.open(run_dir.path).manifest
    assert (found["state"], found["error"]) == (state, told)


# Optional packages


def spectrum() -> dict:
    before = [1.0, 0.5, 0.1]
    return {"before": before, "after": [sum(before) / 3] * 3, "stable_rank": 1.26, "rms_over_mean": 1.2}


@pytest.mark.parametrize(
    ("log", "package"), [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb="project"), "wandb")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, log, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"pip install 'isoloco\[{package}\]'"):
        check_extras(RunConfig(log=log))
    check_extras(RunConfig())


def test_tensorboard_goes_on_in_the_same_run(tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    conf = config(tmp_path / "r", log=LogConfig(tensorboard=True))
    run_dir = RunDir.create(conf)
    first = tracker(run_dir, conf, quiet=True)
    play(first, last=2)
    first.spectra(round=2, step=2 * H, matrices={"q.weight": spectrum()})
    play(first, first=3, last=3)
    first.inner(round=4, step=16, worker=0, loss=99.0, grad_norm=1.0, lr=1.0, tokens=1)
    first.close()
    with tracker(RunDir.open(run_dir.path), conf, quiet=True, resume=True) as t:
        t.truncate(2 * H)
        play(t, first=3)
    events = EventAccumulator(str(run_dir.path / "tensorboard"))
    events.Reload()
    steps = [e.step for e in events.Scalars("inner_loss/worker_0")]
    assert sorted(set(steps)) == steps == list(range(1, ROUNDS * H + 1))
    assert [e.value for e in events.Scalars("valid/loss")] == pytest.approx([3.0, 2.5, 2.8, 2.6])
    assert [e.value for e in events.Scalars("stable_rank/q.weight")] == pytest.approx([1.26])
    assert {"inner/lr", "round/train_loss", "round/peak_memory_bytes"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it reads the environment once in a process, and another test may have been first
    conf = from_flat(
        {"out_dir": str(tmp_path / "r"), "workers": W, "sync_every": H, "global_batch_size": 4, "log.wandb": "p"}
    )
    run_dir = RunDir.create(conf)
    first = tracker(run_dir, conf, quiet=True)
    play(first, last=1)
    first.close()
    with tracker(RunDir.open(run_dir.path), conf, quiet=True, resume=True) as t:
        t.truncate(H)
        play(t, first=2)
    assert "was lost" not in capsys.readouterr().err
    ids = {path.name.rsplit("-", 1)[1] for path in Path(run_dir.path, "wandb").glob("offline-run-*")}
    assert ids == {RunDir.open(run_dir.path).manifest["wandb_id"]}
