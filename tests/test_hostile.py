"""Files that somebody made to do harm: refused in one line, nothing outside their directory read, no code run.

The payload of each would create a file; it never does.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from isoloco import train
from isoloco.cli import main
from isoloco.config import from_flat
from isoloco.files import seal
from tiny_models import config_file

CODE = """
open("PWNED", "w").close()
class Config: pass
class Model: pass
class Tokenizer: pass
"""
TAG = '!!python/object/apply:builtins.open ["PWNED", "w"]'


class Pickled:
    """Its unpickling opens a file for writing."""

    def __reduce__(self):
        return open, ("PWNED", "w")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, shards) -> Path:
    """A model, data and a run that was stopped: all honest so far."""
    place = tmp_path_factory.mktemp("hostile")
    config_file("llama", place)
    shutil.copytree(shards, place / "data")
    values = {
        "out_dir": str(place / "run"), "model.config": str(place / "llama.json"), "model.seq_len": 16,
        "data.path": str(place / "data"), "workers": 2, "sync_every": 1, "global_batch_size": 4, "budget.steps": 2,
        "compute.threads": 1, "eval.tokens": 32,
    }  # fmt: skip
    asked = iter(range(99))
    train(from_flat(values), stop=lambda: "requeue" if next(asked) == 2 else "")
    shutil.copytree(place / "run" / "checkpoints" / "r000001" / "anchor", place / "model")
    for path in ("evil.py", "model/evil.py", "data/tokenizer/evil.py"):
        (place / path).write_text(CODE)
    shutil.copyfile(place / "model" / "model.safetensors", place / "elsewhere.safetensors")
    return place


@pytest.fixture
def place(prepared, tmp_path, monkeypatch, capsys):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("PWNED"))


TRAIN = "train --model.seq_len 16 --workers 2 --global_batch_size 4 --budget.steps 2 --out_dir new"
FROM_MODEL = f"{TRAIN} --data.path data --model.init_from model"
EVALUATE = "evaluate model --data data --seq-len 16"


def refused(capsys, command: str, *words: str) -> None:
    assert main(command.split()) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    for word in words:
        assert word in told, told
    assert not Path("new").exists()


def change(path: str, do: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file, as `do` does the object in it."""
    content = json.loads(Path(path).read_text())
    do(content)
    Path(path).write_text(json.dumps(content))


# Models


def index(*names: Any) -> Callable[[], None]:
    """The model's weights in an index that names these files for them."""

    def make() -> None:
        weights = Path("model/model.safetensors")
        with safe_open(weights, "pt") as file:
            keys = sorted(file.keys())
        weights.unlink()
        Path("model/weights.bin").write_bytes(pickle.dumps(Pickled()))
        files = {key: names[i % len(names)] for i, key in enumerate(keys)}
        Path("model/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    return make


def linked(path: str, target: str) -> Callable[[], None]:
    def make() -> None:
        Path(path).unlink()
        os.symlink(target, path)

    return make


def pickled(path: str) -> Callable[[], None]:
    def make() -> None:
        Path("model/model.safetensors").unlink()
        torch.save({"x": Pickled()}, path)

    return make


def configured(**values: Any) -> Callable[[], None]:
    return lambda: change("model/config.json", lambda config: config.update(values))


MODELS = [
    ("up", index("../elsewhere.safetensors"), "names the file '../elsewhere.safetensors'"),
    ("absolute", index("/etc/hostname"), "names the file '/etc/hostname'"),
    ("backslash", index("..\\elsewhere.safetensors"), "takes plain names of files beside it"),
    ("number", index(3), "names the file 3"),
    ("pickle in index", index("weights.bin"), "no safetensors file weights.bin there"),
    ("absent", index("more.safetensors"), "no safetensors file more.safetensors there"),
    ("link", linked("model/model.safetensors", "../elsewhere.safetensors"), "leads out of model, to "),
    ("linked config", linked("model/config.json", "../llama.json"), "leads out of model, to "),
    ("pickle", pickled("model/model.safetensors"), "its weights cannot be read"),
    ("pickle by its name", pickled("model/pytorch_model.bin"), "weights are read from safetensors files only"),
    ("auto_map", configured(auto_map={"AutoModelForCausalLM": "evil.Model"}), "asks for remote code (auto_map)"),
    ("auto_map below", configured(text_config={"auto_map": {"AutoModel": "evil.Model"}}), "remote code (auto_map)"),
    ("alien type", configured(model_type="evil"), "unknown model_type 'evil'"),
    ("adapter", lambda: Path("model/adapter_config.json").write_text("{}"), "holds an adapter"),
    ("deep", lambda: Path("model/config.json").write_text("[" * 100_000), "not JSON"),
    ("list", lambda: Path("model/config.json").write_text("[]"), "holds no JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_a_model(make, told, place, capsys):
    make()
    refused(capsys, FROM_MODEL, told)
    refused(capsys, EVALUATE, told)


def test_kernels_that_another_machine_chose_are_not_looked_for(place, capsys):
    """The name of a kernel is that of a repository of the Hub, whose code would be run."""
    names = dict.fromkeys(("attn_implementation", "_attn_implementation", "experts_implementation"), "evil/kernel")
    configured(**names)()
    assert main(EVALUATE.split()) == 0


def test_the_files_of_the_hubs_cache_are_links_and_are_read(place, capsys):
    cache = place / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    snapshot = cache / "snapshots" / "abc"
    shutil.move("model", snapshot)
    for number, path in enumerate(sorted(snapshot.glob("*"))):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert main(["evaluate", str(snapshot), "--data", "data", "--seq-len", "16"]) == 0


# Runs


def test_an_anchor_that_asks_for_code(place, capsys):
    """The manifest of the checkpoint vouches for it: whoever made the one made the other."""
    checkpoint = Path("run/checkpoints/r000001")
    change(f"{checkpoint}/anchor/config.json", lambda c: c.update(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    shutil.copyfile("evil.py", checkpoint / "anchor" / "evil.py")
    resealed(checkpoint, lambda manifest: None)
    refused(capsys, "train --resume run", "asks for remote code (auto_map)")


def resealed(checkpoint: Path, do: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's manifest and make its checksums right again."""
    from isoloco.files import digest

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["blake2b"]
    for name, entry in manifest["files"].items():
        entry |= {"bytes": (checkpoint / name).stat().st_size, "blake2b": digest(checkpoint / name)}
    do(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(seal(manifest)))


def test_a_checkpoint_that_names_files_elsewhere(place, capsys):
    resealed(Path("run/checkpoints/r000001"), lambda m: m["files"].update({"../../../elsewhere.safetensors": {}}))
    refused(capsys, "train --resume run", "names the file '..'")


def test_a_checkpoint_whose_files_are_links(place, capsys):
    weights = Path("run/checkpoints/r000001/workers/0.safetensors")
    shutil.move(weights, "w.safetensors")
    weights.symlink_to(Path("w.safetensors").absolute())
    refused(capsys, "train --resume run", "workers/0.safetensors leads out of ")


def test_the_states_of_a_checkpoint_are_no_pickles(place, capsys):
    torch.save({"x": Pickled()}, "run/checkpoints/r000001/workers/0.safetensors")
    resealed(Path("run/checkpoints/r000001"), lambda manifest: None)
    refused(capsys, "train --resume run", "workers/0.safetensors cannot be read")


def test_an_evaluation_runs_no_rule_of_the_runs(place, capsys, monkeypatch):
    """A rule of one's own is code by its name; only a training needs it."""
    monkeypatch.syspath_prepend(str(place))
    text = Path("run/config.yaml").read_text()
    assert "  name: iso_c\n" in text
    Path("run/config.yaml").write_text(text.replace("  name: iso_c\n", "  name: evil:f\n"))
    shutil.copytree("model", "run/model")
    assert main(["evaluate", "run"]) == 0


# Data and tokenizers


def test_a_shard_of_pickles(place, capsys):
    Path("bare").mkdir()
    np.save("bare/train_000000.npy", np.array([Pickled()] * 3, dtype=object), allow_pickle=True)
    refused(capsys, f"{TRAIN} --model.config llama.json --data.path bare", "shard bare/train_000000.npy is corrupt")
    Path("bare/train_000000.npy").write_bytes(pickle.dumps(Pickled()))
    refused(capsys, f"{TRAIN} --model.config llama.json --data.path bare", "shard bare/train_000000.npy is corrupt")


DATA = f"{TRAIN} --model.config llama.json --data.path data"


def of_manifest(do: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    def make() -> None:
        manifest = json.loads(Path("data/manifest.json").read_text())
        del manifest["blake2b"]
        do(manifest)
        Path("data/manifest.json").write_text(json.dumps(seal(manifest)))

    return make


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (of_manifest(lambda m: m["splits"]["train"]["shards"][0].update(file="../x.npy")), "names the file '../x.npy'"),
        (of_manifest(lambda m: m["splits"]["train"]["shards"][0].update(file=["x"])), "names the file ['x']"),
        (of_manifest(lambda m: m.update(vocab_size="many")), "is not a manifest of `isoloco prepare`"),
        (of_manifest(lambda m: m.update(splits=3)), "is not a manifest of `isoloco prepare`"),
        (of_manifest(lambda m: m.update(tokenizer_files=[])), "is not a manifest of `isoloco prepare`"),
        (lambda: Path("data/manifest.json").write_text("[" * 100_000), "is not a manifest of `isoloco prepare`"),
    ],
    ids=["up", "list", "words", "splits", "files", "deep"],
)
def test_a_manifest_of_data(make, told, place, capsys):
    make()
    refused(capsys, DATA, told)


def test_a_shard_that_is_a_link_out_of_its_directory(place, capsys):
    shutil.move("data/train_000000.npy", "train.npy")
    Path("data/train_000000.npy").symlink_to(Path("train.npy").absolute())
    refused(capsys, DATA, "leads out of data")
    shutil.rmtree("run")
    os.remove("data/train_000000.npy")
    shutil.move("train.npy", "data/train_000000.npy")
    shutil.move("data", "far")
    Path("data").symlink_to("far")  # the directory itself may be one
    assert main(["plan", *DATA.split()[1:]]) == 0


def tokenizer(**values: Any) -> Callable[[], None]:
    return lambda: change("data/tokenizer/tokenizer_config.json", lambda config: config.update(values))


TOKENIZERS = [
    ("auto_map", tokenizer(auto_map={"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}), "remote code (auto_map)"),
    ("class", tokenizer(auto_map={"AutoTokenizer": "evil.Tokenizer"}, tokenizer_class="Tokenizer"), "remote code"),
    ("no name", tokenizer(tokenizer_class=["os", "system"]), "tokenizer_class is ['os', 'system'], takes a name"),
    ("list", lambda: Path("data/tokenizer/tokenizer_config.json").write_text("[]"), "holds no JSON object"),
    ("link", linked("data/tokenizer/tokenizer.json", "../../llama.json"), "leads out of data/tokenizer"),
    ("config", lambda: Path("data/tokenizer/config.json").write_text('{"auto_map": {}}'), "remote code (auto_map)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), [case[1:] for case in TOKENIZERS], ids=[case[0] for case in TOKENIZERS])
def test_a_tokenizer(make, told, place, capsys):
    make()
    Path("text.txt").write_text("Some text.\n" * 99)
    refused(capsys, DATA, told)
    refused(capsys, "prepare text.txt --tokenizer data/tokenizer --out new", told)


def test_a_tokenizer_of_pickles_has_no_fast_form(place, capsys):
    shutil.rmtree("data/tokenizer")
    Path("data/tokenizer").mkdir()
    Path("data/tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "TransfoXLTokenizer"}')
    for name in ("vocab.pkl", "vocab.bin", "tokenizer.pkl"):
        Path(f"data/tokenizer/{name}").write_bytes(pickle.dumps(Pickled()))
    Path("text.txt").write_text("Some text.\n" * 99)
    refused(capsys, "prepare text.txt --tokenizer data/tokenizer --out new", "data/tokenizer")


def test_no_pickle_of_a_tokenizer_is_carried_on(place, capsys):
    from isoloco.model import build, export

    for name in ("vocab.pkl", "tokenizer.pkl", "tokenizer.py"):
        Path(f"data/tokenizer/{name}").write_bytes(pickle.dumps(Pickled()))
    config = from_flat({"model.config": "llama.json", "model.seq_len": 16, "data.path": "data"})
    model = build(config, vocab_size=300)
    export(model, dict(model.named_parameters()), "copy", tokenizer_dir="data/tokenizer", card="")
    assert {path.suffix for path in Path("copy").iterdir()} == {".json", ".safetensors", ".md"}


# Recipes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"name: {TAG}\n", "could not determine a constructor for the tag"),
        (f"? {TAG}\n: 1\n", "not valid YAML"),
        ("name: !!python/name:os.system\n", "could not determine a constructor for the tag"),
        ("a: &a [x]\nb: *a\n", "takes no alias"),
        ("name: " + "[" * 3_000, "nested too deep"),
        ("workers: 2\nworkers: 3\n", "'workers' comes twice"),
        ("inner: {lr: 1.0}\ninner.lr: 2.0\n", "inner.lr comes twice"),
        ("name: !!timestamp x\n", "is not what its form or tag says"),
        ("name: 2020-99-99\n", "is not what its form or tag says"),
    ],
    ids=["call", "key", "name", "alias", "deep", "twice", "dotted", "tag", "date"],
)
def test_yaml(text, told, place, capsys):
    Path("recipe.yaml").write_text(text)
    refused(capsys, "train recipe.yaml", "recipe.yaml", told)
    Path("study.yaml").write_text(text)
    refused(capsys, "study status study.yaml", "study.yaml" if "inner.lr" in told else told)


def test_the_config_of_a_run(place, capsys):
    Path("run/config.yaml").write_text(f"name: {TAG}\n")
    refused(capsys, "train --resume run", "run/config.yaml is damaged")
    shutil.copytree("model", "run/model")
    refused(capsys, "evaluate run", "run/config.yaml is damaged")
