"""A machine that gives no more, made for real: a disk that is full or read-only, no memory left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from faults import no_file_larger_than
from isoloco import train
from isoloco.config import flat
from isoloco.metrics import read_metrics
from isoloco.rundir import RunDir
from tiny_models import config_file, short_run


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("llama", tmp_path)
    ours = {"eval__every_rounds": 0, "inner__lr": 1e-3}
    return lambda name="run", **dotted: short_run(tmp_path / name, shards, network, **{**ours, **dotted})


# Disks


def test_files_that_cannot_grow_while_saving(make, capsys):
    """The nearest real limit to a full disk that needs no rights: no weights can be written in rounds 2 and 3."""
    config, held = make(sync_every=1, budget__steps=5, checkpoint__best=False), []

    def observe(phase: str, **info: Any) -> None:
        if phase == "outer" and info["round"] == 1:
            held.append(no_file_larger_than(12_000))
            held[0].__enter__()
        if phase == "outer" and info["round"] == 3:
            held.pop().__exit__(None, None, None)

    run = train(config, observe=observe).run_dir
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    assert len(told) == 2
    for number, line in zip((2, 3), told, strict=True):
        assert line.startswith(f"warning: checkpoint r00000{number} could not be written (")
        assert line.endswith("File too large (os error 27)); r000001 is the last one")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["r000004", "r000005"]
    assert [r["round"] for r in read_metrics(run) if r["kind"] == "round"] == [1, 2, 3, 4, 5]


SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from isoloco import train
from isoloco.config import from_flat
from isoloco.cli import main

place = Path(sys.argv[1])
config = lambda name, **dotted: from_flat({**json.loads(sys.argv[2]), "out_dir": str(place / name), **dotted})

def sh(*words):
    subprocess.run([str(word) for word in words], check=True)

def say(*words):
    print(*words, file=sys.stderr, flush=True)

def fill():
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            say("filled:", error.strerror)

def at(**doing):
    def observe(phase, **info):
        if phase == "outer" and f"round{info['round'] + 1}" in doing:
            doing.pop(f"round{info['round'] + 1}")()
    return observe

def names(run):
    return sorted(p.name for p in (place / run / "checkpoints").iterdir())
"""

FULL = (
    SCRIPT
    + """
sh("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place)
(place / "filler").touch()
run = train(config("a"), observe=at(round2=fill, round4=lambda: os.remove(place / "filler"))).run_dir
say("kept", names("a"))

# full to the end: the model cannot be left; with room again the same run ends
try:
    train(config("b"), observe=at(round3=fill))
except ValueError as error:
    say("ended:", error)
say("kept", names("b"))
os.remove(place / "filler")
say("code", main(["train", "--resume", str(place / "b")]))

# workers' states need the disk at every turn
try:
    train(config("c", **{"compute.worker_state": "disk"}), observe=at(round2=fill))
except ValueError as error:
    say("ended:", error)
"""
)

READ_ONLY = (
    SCRIPT
    + """
def lock(path):
    sh("mount", "--bind", path, path)
    sh("mount", "-o", "remount,bind,ro", path)

(place / "locked").mkdir()
lock(place / "locked")
for name in ("locked", "locked/deeper/run"):
    try:
        train(config(name))
    except ValueError as error:
        say("refused:", error)

run = place / "a"
train(config("a"), observe=at(round2=lambda: lock(run), round4=lambda: sh("umount", "-l", run)))
say("kept", names("a"))
lock(run)
say("code", main(["train", "--resume", str(run), "--budget.steps", "12"]))
"""
)


@pytest.fixture
def in_namespace(make, tmp_path):
    """Run a script where it may mount what it likes, in a user namespace of its own; its standard error."""
    tried = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True)
    if shutil.which("unshare") is None or tried.returncode:
        pytest.skip("no user namespaces here: a file system of one's own cannot be mounted")

    def run(script: str) -> list[str]:
        place = tmp_path / "place"
        place.mkdir()
        values = {k: v for k, v in flat(make(sync_every=1, budget__steps=5)).items() if v is not None}
        ran = subprocess.run(
            ["unshare", "-Urm", sys.executable, "-c", script, str(place), json.dumps(values)],
            capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stderr.splitlines()

    return run


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts of Linux")
def test_a_disk_that_is_full(in_namespace):
    told = in_namespace(FULL)
    full = "No space left on device"
    warned = [line for line in told if "warning: checkpoint" in line]
    assert told[0] == f"filled: {full}"
    assert all(full in line for line in warned)
    last = [line.split("; ")[-1] for line in warned]
    assert last == [f"r00000{n} is the last one" for n in (1, 1, 2, 2, 2, 1)]  # of a, of b, of c
    assert [line for line in told if line.startswith("kept")] == [
        "kept ['r000004', 'r000005']",
        "kept ['r000001', 'r000002']",
    ]
    ended = [line for line in told if line.startswith("ended:")]
    assert f"what the run leaves at its end cannot be written ({full}" in ended[0]
    assert "--resume" in ended[0]
    assert "its state cannot wait on disk" in ended[1]
    assert full in ended[1]
    assert "code 0" in told


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts of Linux")
def test_a_disk_that_is_read_only(in_namespace):
    told = in_namespace(READ_ONLY)
    refusals = [line for line in told if line.startswith("refused:")]
    assert len(refusals) == 2
    assert all("locked cannot be written (read-only); choose another place" in line for line in refusals)
    warned = [line for line in told if "warning: checkpoint" in line]
    assert [line.split("could not be written ")[1] for line in warned] == [
        "(Read-only file system); r000001 is the last one"
    ] * 2
    assert "kept ['r000004', 'r000005']" in told
    assert any("cannot be written (read-only): a run goes on in its own directory" in line for line in told)
    assert "code 2" in told


# Memory

BIG = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from isoloco.cli import main
from isoloco import model, train  # all that takes address space by itself

before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + 400 * 2**20,) * 2)
for line in json.loads(sys.argv[1]):
    print(main(line), file=sys.stderr, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of Linux")
def test_out_of_memory_is_one_line_that_names_what_to_lower(make, shards, tmp_path):
    wide = config_file("llama", tmp_path, hidden_size=8192, intermediate_size=30000)
    deep = config_file("llama", tmp_path / "..", hidden_size=64, intermediate_size=16384)
    common = [
        "train", "--model.seq_len=32", f"--data.path={shards}", "--workers=2", "--sync_every=1", "--budget.steps=2",
        "--compute.threads=1", "--data.epochs=9",
    ]  # fmt: skip
    lines = [
        [*common, f"--model.config={wide}", "--global_batch_size=4", f"--out_dir={tmp_path / 'wide'}"],
        [*common, f"--model.config={deep}", "--global_batch_size=256", "--micro_batch_size=128",
         f"--out_dir={tmp_path / 'deep'}"],
    ]  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", BIG, json.dumps(lines)], capture_output=True, text=True)
    told = [line for line in ran.stderr.splitlines() if line]
    assert [told[1], told[3]] == ["1", "1"], ran.stderr
    assert all(told[i].startswith("isoloco: out of memory (for ") for i in (0, 2)), ran.stderr
    assert "or take a smaller model" in told[0]
    assert "lower micro_batch_size (it is 128)" in told[2]
    assert not (tmp_path / "wide").exists()
    assert RunDir.open(tmp_path / "deep").manifest["state"] == "failed"
    assert "out of memory" in RunDir.open(tmp_path / "deep").manifest["error"]
