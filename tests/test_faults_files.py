"""Files that were damaged for real: flipped bits, cut ends, files that are gone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults import requeue_at
from isoloco import train
from isoloco.cli import main
from isoloco.config import RunConfig
from isoloco.metrics import check_records
from isoloco.resume import read_config
from isoloco.rundir import RunDir
from isoloco.saved import read_manifest
from tiny_models import config_file, short_run

PREVIOUS = "go on from the checkpoint before it: --resume-from-previous"


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("llama", tmp_path)
    ours = {"eval__every_rounds": 0, "inner__lr": 1e-3}
    return lambda name="run", **dotted: short_run(tmp_path / name, shards, network, **{**ours, **dotted})


def from_place(place: Path, name: str, *, data: str = "data") -> RunConfig:
    """A run in a directory that holds its network and its data."""
    network = str(place / "llama.json")
    return short_run(place / name, place / data, network, eval__every_rounds=0, inner__lr=1e-3)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, shards) -> Path:
    """A directory with data and a run that was stopped in the middle of its third round, a checkpoint before that."""
    place = tmp_path_factory.mktemp("stopped")
    config_file("llama", place)
    shutil.copytree(shards, place / "data")
    config = from_place(place, "run")
    assert train(config, stop=requeue_at(12)).state == "stopped"
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
    whole = train(from_place(copy, "whole")).run_dir
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
        try:
            assert read_manifest(tmp_path) == manifest  # one kind of white space for another
        except ValueError as error:
            assert re.search(r"manifest\.json (is damaged|has format|names)", str(error))  # noqa: PT017
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
    config = from_place(copy, "bare_run", data="bare")
    train(config, stop=requeue_at(6))
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
