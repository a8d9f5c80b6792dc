"""Faults made for real: damaged files, a disk that is full or read-only, numbers that are none, no memory left."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isoloco import train
from isoloco.cli import main
from isoloco.config import RunConfig, flat, from_flat
from isoloco.evaluate import evaluate_directory, sample
from isoloco.metrics import check_records, read_metrics
from isoloco.resume import read_config
from isoloco.rundir import RunDir
from isoloco.saved import read_manifest
from tiny_models import config_file

PREVIOUS = "go on from the checkpoint before it: --resume-from-previous"


def a_config(place: Path, shards: Path, name: str, **dotted: Any) -> RunConfig:
    values: dict[str, Any] = {
        "out_dir": str(place / name), "model.config": str(place / "llama.json"), "model.seq_len": 16,
        "data.path": str(shards), "workers": 2, "sync_every": 2, "global_batch_size": 4, "budget.steps": 8,
        "compute.threads": 1, "eval.every_rounds": 0, "eval.tokens": 64, "checkpoint.every_rounds": 1,
        "log.every_steps": 1, "inner.lr": 1e-3,
    }  # fmt: skip
    return from_flat(values | {key.replace("__", "."): value for key, value in dotted.items()})


@pytest.fixture
def make(shards, tmp_path):
    config_file("llama", tmp_path)
    return lambda name="run", **dotted: a_config(tmp_path, shards, name, **dotted)


def after(calls: int) -> Callable[[], str]:
    asked = iter(range(1, 10**9))
    return lambda: "requeue" if next(asked) >= calls else ""


# Files


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, shards) -> Path:
    """A directory with data and a run that was stopped in the middle of its third round, a checkpoint before that."""
    place = tmp_path_factory.mktemp("stopped")
    config_file("llama", place)
    shutil.copytree(shards, place / "data")
    config = a_config(place, place / "data", "run")
    assert train(config, stop=after(12)).state == "stopped"
    assert sorted(p.name for p in (place / "run" / "checkpoints").iterdir()) == ["r000002", "r000002-w001-s00001"]
    return place


@pytest.fixture
def copy(stopped, tmp_path, monkeypatch) -> Path:
    """That place in a copy, hard links and all, and as the current directory."""
    subprocess.run(["cp", "-a", f"{stopped}/.", str(tmp_path)], check=True)
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(f"{stopped}/data", f"{tmp_path}/data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def harm(path: Path, how: str, *, everywhere: bool = False) -> None:
    """Flip a bit in the middle of a file, cut it, or remove it; ``everywhere``: in all hard links to it."""
    content = bytearray(path.read_bytes())
    if not everywhere or how == "loss":
        path.unlink()
    if how == "flip":
        content[len(content) // 2] ^= 1
    if how != "loss":
        path.write_bytes(content if how == "flip" else content[: len(content) * 3 // 4])


def resume(*more: str) -> int:
    return main(["train", "--resume", "run", *more])


def refused(capsys, *words: str) -> None:
    """The command's answer was one line that says these words, and nothing of the run has changed."""
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert told.startswith("isoloco: "), told
    for word in words:
        assert word in told, told


HARMS = ["flip", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "loss"))]
OF_CHECKPOINT = [
    "manifest.json", "round.safetensors", "outer.safetensors", "workers/0.safetensors", "workers/1.safetensors",
    "anchor/model.safetensors", "anchor/config.json", "anchor/generation_config.json", "anchor/tokenizer.json",
    "anchor/tokenizer_config.json", "anchor/README.md",
]  # fmt: skip


def test_every_file_of_a_checkpoint_is_among_those_that_are_harmed(stopped):
    last = stopped / "run" / "checkpoints" / "r000002-w001-s00001"
    assert {str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()} == set(OF_CHECKPOINT)


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("file", OF_CHECKPOINT)
def test_a_file_of_the_last_checkpoint(file, how, copy, capsys):
    harm(copy / "run" / "checkpoints" / "r000002-w001-s00001" / file, how)
    before = sorted(p for p in copy.rglob("*"))
    assert resume() == 2
    refused(capsys, f"r000002-w001-s00001/{file}", "is missing" if how == "loss" else "is damaged", PREVIOUS)
    assert sorted(p for p in copy.rglob("*")) == before


@pytest.mark.slow
def test_the_checkpoint_before_serves_and_ends_as_the_run_that_was_not_stopped(copy, capsys, shards):
    for file in ("manifest.json", "round.safetensors"):
        harm(copy / "run" / "checkpoints" / "r000002-w001-s00001" / file, "cut")
    assert resume("--resume-from-previous") == 0
    whole = train(a_config(copy, copy / "data", "whole")).run_dir
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, copy / "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_where_both_checkpoints_have_the_same_file_neither_is_offered(copy, capsys):
    harm(copy / "run" / "checkpoints" / "r000002" / "anchor" / "model.safetensors", "flip", everywhere=True)
    assert resume() == 2
    refused(capsys, "r000002-w001-s00001/anchor/model.safetensors", "no other checkpoint is whole: start the run again")
    assert resume("--resume-from-previous") == 2
    refused(capsys, "r000002/anchor/model.safetensors", "no other checkpoint is whole: start the run again")


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("file", ["run.json", "config.yaml", "metrics.jsonl"])
def test_a_file_of_the_run(file, how, copy, capsys):
    path = copy / "run" / file
    if (file, how) == ("config.yaml", "flip"):  # one that YAML does not notice
        path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.003"))
    elif (file, how) == ("run.json", "flip"):
        path.write_text(path.read_text().replace("{", "z", 1))
    else:
        harm(path, how)
    if (file, how) == ("metrics.jsonl", "loss"):  # the training does not need it
        assert resume() == 0
        told = capsys.readouterr().err
        assert told.count("warning: metrics.jsonl was lost: the run goes on without its ") == 1
        return
    assert resume() == 2
    words = {
        "run.json": "run.json" if how != "flip" else "run.json is not JSON",
        "config.yaml": "inner.lr 0.001 -> 0.003" if how == "flip" else "config.yaml is damaged",
        "metrics.jsonl": "metrics.jsonl is damaged: its first",
    }
    refused(capsys, words[file])


def told_by(do: Callable[[], object]) -> str:
    try:
        do()
    except ValueError as error:
        return str(error)
    return ""


def test_a_byte_anywhere_in_a_text_is_told_or_changes_no_result(stopped, tmp_path):
    """Of config.yaml, which a resume compares with the manifest's, and of run.json only what kind of error it is."""
    run = stopped / "run"
    checkpoint = run / "checkpoints" / "r000002-w001-s00001"
    manifest = read_manifest(checkpoint)

    def flipped(path: Path, every: int) -> Iterator[None]:
        content = path.read_bytes()
        for place in range(0, len(content), every):
            changed = bytearray(content)
            changed[place] ^= 1 + place % 7
            (tmp_path / path.name).write_bytes(changed)
            yield

    for _ in flipped(checkpoint / "manifest.json", 3):
        with pytest.raises(ValueError, match=r"manifest\.json (is damaged|has format|names)"):
            read_manifest(tmp_path)
    records = b"".join((run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[: manifest["records"]])
    (tmp_path / "records.jsonl").write_bytes(records)
    (tmp_path / "kept").mkdir()
    (tmp_path / "records.jsonl").rename(tmp_path / "kept" / "records.jsonl")
    for _ in flipped(tmp_path / "kept" / "records.jsonl", 1):
        with pytest.raises(ValueError, match=r"records\.jsonl is damaged"):
            check_records(tmp_path / "records.jsonl", manifest)
    for _ in flipped(run / "run.json", 5):
        assert "\n" not in told_by(lambda: RunDir.open(tmp_path))
    for _ in flipped(run / "config.yaml", 5):
        assert "\n" not in told_by(lambda: read_config(tmp_path / "config.yaml"))


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize(
    "file",
    ["train_000000.npy", "valid_000000.npy", "manifest.json", "tokenizer/tokenizer.json",
     "tokenizer/tokenizer_config.json"],
)  # fmt: skip
def test_a_file_of_the_data(file, how, copy, capsys):
    harm(copy / "data" / file, how)
    for command in (["--resume", "run"], ["--config", "run/config.yaml", "--out_dir", "new"]):
        assert main(["train", *command]) == 2
        refused(capsys, file)
    assert not (copy / "new").exists()


def test_other_data_under_the_same_path_is_told(copy, capsys):
    from isoloco.data.prepare import prepare

    text = "\n<|endoftext|>\n".join(f"{i} of many, {i * i} squared, and so on it goes" for i in range(900))
    (copy / "text.txt").write_text(text + "\n")
    shutil.rmtree(copy / "data")
    prepare(out_dir=copy / "data", source=str(copy / "text.txt"), tokenizer="train:bpe:300", valid_tokens=0.2,
            test_tokens=0.1, progress=False)  # fmt: skip
    assert resume() == 2
    refused(capsys, "its data is another one since r000002-w001-s00001; bring it back, or start a new run")


def test_the_authors_layout_has_no_manifest_and_is_compared_all_the_same(copy, capsys):
    shutil.copytree(copy / "data", copy / "bare")
    shutil.rmtree(copy / "bare" / "tokenizer")
    (copy / "bare" / "manifest.json").unlink()
    config = a_config(copy, copy / "bare", "bare_run")
    train(config, stop=after(6))
    harm(copy / "bare" / "train_000000.npy", "flip")
    assert main(["train", "--resume", "bare_run"]) == 2
    refused(capsys, "its data is another one since")


@pytest.mark.slow
def test_files_that_a_finished_run_leaves(make, capsys):
    run = train(make(compute__worker_state="disk", eval__every_rounds=2)).run_dir
    for file, word in [("model/model.safetensors", "is damaged"), ("best/model.safetensors", "is damaged")]:
        whole = (run / file).read_bytes()
        harm(run / file, "flip")
        assert main(["evaluate", str((run / file).parent)]) == 2
        refused(capsys, file, word)
        (run / file).write_bytes(whole)
    for file in ("overview.png", "model/README.md", "best/isoloco.json"):  # nothing that is computed reads them
        harm(run / file, "cut")
        assert main(["evaluate", str(run)]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--budget.steps", "12"]) == 0
    assert (run / "overview.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    assert json.loads((run / "best" / "isoloco.json").read_text())["step"] == 12


@pytest.mark.parametrize("how", HARMS)
def test_the_state_of_a_worker_that_waits_on_disk(how, make):
    """In the middle of a run: whoever is next finds out."""
    config, calls = make(compute__worker_state="disk"), iter(range(10**9))

    def observe(phase: str, **info: Any) -> None:
        if phase == "reduced" and next(calls) == 1:
            (waiting,) = (Path(config.out_dir or "") / "workers").glob("1-*.safetensors")
            harm(waiting, how, everywhere=True)

    with pytest.raises(ValueError, match=r"workers/1-4-\d+\.safetensors") as raised:
        train(config, observe=observe)
    assert "\n" not in str(raised.value)
    assert RunDir.open(config.out_dir or "").manifest["state"] == "failed"


# Disks


@contextmanager
def no_file_larger_than(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


# Numbers


@contextmanager
def live_model() -> Iterator[list[torch.nn.Module]]:
    """The model that trains, found as its forward pass begins."""
    seen: list[torch.nn.Module] = []

    def look(module: torch.nn.Module, _: Any) -> None:
        if hasattr(module, "lm_head"):
            seen[:] = [module]

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def poison(models: list[torch.nn.Module], *, worker: int, rounds: set[int]) -> Callable[..., None]:
    """After that worker's last step of those rounds one of its weights is not a number."""

    def observe(phase: str, **info: Any) -> None:
        if phase == "inner" and info["worker"] == worker and info["step"] % 2 == 1 and info["step"] // 2 + 1 in rounds:
            with torch.no_grad():
                models[0].lm_head.weight[3, 1] = float("nan")  # type: ignore[union-attr]

    return observe


def rounds_of(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run) if r["kind"] == "round"]


def test_a_delta_that_is_not_finite_once(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison(models, worker=1, rounds={2})).run_dir
    assert [r["dropped"] for r in rounds_of(run)] == [[], [1], [], []]
    assert capsys.readouterr().err.splitlines() == [
        "warning: not finite: round 2, what delta, worker 1, step 4, tensor lm_head.weight, tensors 1"
    ]
    # it is back with a state of its own that is finite: of the two rounds since, four steps
    state = load_file(run / "checkpoints" / "r000004" / "workers" / "1.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {int(tensor) for name, tensor in state.items() if "/step/" in f"/{name}"} == {4}
    assert all(tensor.isfinite().all() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_a_delta_that_is_never_finite(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison(models, worker=0, rounds={1, 2, 3, 4})).run_dir
    assert [r["dropped"] for r in rounds_of(run)] == [[0]] * 4
    assert capsys.readouterr().err.count("warning: not finite: ") == 4
    assert all(tensor.isfinite().all() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_a_delta_that_is_not_finite_with_abort(make):
    with (
        live_model() as models,
        pytest.raises(ValueError, match=r"worker 1, round 2: the delta of lm_head\.weight") as e,
    ):
        train(make(on_nonfinite="abort"), observe=poison(models, worker=1, rounds={2}))
    assert "lower inner.lr, or set on_nonfinite: skip" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_model_that_has_diverged(make):
    """Its last step leaves a weight that is no number: the run ends as others do, and says what it has."""
    with live_model() as models:
        config = make(method="dp", budget__steps=2)
        result = train(config, observe=poison(models, worker=0, rounds={1}))
    assert result.state == "finished"
    assert not math.isfinite(result.final_loss)
    assert not (result.run_dir / "best").exists()
    assert json.loads((result.run_dir / "model" / "isoloco.json").read_text())["loss"] is None
    with pytest.raises(ValueError, match="LlamaForCausalLM: its logits are not finite; weights that have diverged"):
        evaluate_directory(result.run_dir)
    with pytest.raises(ValueError, match="the model's logits are not finite: it has diverged, and writes nothing"):
        sample(models[0], result.run_dir / "model", tokens=3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_nobody_is_left(make):
    """A learning rate at which the weights themselves overflow."""
    with pytest.raises(ValueError, match=r"^round 1: no worker is left, every delta is not finite; lower inner.lr"):
        train(make(inner__lr=3e38, inner__warmup_frac=0.0))


def poison_gradients(models: list[torch.nn.Module], *, worker: int, steps: set[int]) -> Callable[..., None]:
    """In that worker's steps of these numbers one number of one gradient is infinite, as where a sum overflows."""
    now: dict[str, Any] = {"worker": None, "step": 0, "begun": 0, "hooked": False}

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if now["worker"] == worker and now["step"] in steps:
            gradient = gradient.clone()
            gradient[3, 1] = float("inf")
        return gradient

    def observe(phase: str, **info: Any) -> None:
        if phase == "turn":
            now["worker"], now["step"] = info["worker"], now["begun"]
            if not now["hooked"]:
                models[0].lm_head.weight.register_hook(hook)  # type: ignore[union-attr]
                now["hooked"] = True
        elif phase == "inner":
            now["step"] = info["step"] + 1
        elif phase == "outer":
            now["begun"] = now["step"]

    return observe


def test_a_gradient_that_is_not_finite_once(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison_gradients(models, worker=1, steps={3})).run_dir
    assert [r["skipped_steps"] for r in rounds_of(run)] == [0, 1, 0, 0]
    assert [r["dropped"] for r in rounds_of(run)] == [[]] * 4
    assert capsys.readouterr().err.splitlines() == [
        "warning: not finite: round 2, what gradient, worker 1, step 3, tensor lm_head.weight, tensors 1"
    ]
    state = load_file(run / "checkpoints" / "r000004" / "workers" / "1.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {int(tensor) for name, tensor in state.items() if "/step/" in f"/{name}"} == {7}


def test_gradients_that_are_never_finite(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison_gradients(models, worker=0, steps=set(range(8)))).run_dir
    assert [r["skipped_steps"] for r in rounds_of(run)] == [2] * 4
    assert all(r["train_loss"] < 10 for r in rounds_of(run))  # of those who took a step
    assert capsys.readouterr().err.count("warning: not finite: ") == 8


def test_a_gradient_that_is_not_finite_with_abort(make):
    with live_model() as models, pytest.raises(ValueError, match=r"^worker 1, step 3: the gradient of lm_head") as e:
        train(make(on_nonfinite="abort"), observe=poison_gradients(models, worker=1, steps={3}))
    assert str(e.value).endswith("is not finite; lower inner.lr, or set on_nonfinite: skip")


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
