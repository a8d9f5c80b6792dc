"""Bad input: one line on standard error, exit code 2, no work begun, nothing left behind."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cli_mistakes import DOZEN, HEAVY, HEAVY_TOO, LIGHT
from isoloco.cli import main
from tiny_models import CONFIGS

COMMAND = Path(sysconfig.get_path("scripts")) / ("isoloco.exe" if os.name == "nt" else "isoloco")


@pytest.fixture(scope="module")
def place(tmp_path_factory, shards) -> Path:
    """A directory with something of everything that a user may get wrong."""
    root = tmp_path_factory.mktemp("place")

    def file(name: str, text: str | bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def array(name: str, tokens: int, dtype: str = "uint16") -> None:
        (root / name).parent.mkdir(exist_ok=True)
        np.save(root / name, (np.arange(tokens) % 64).astype(dtype))

    def network(name: str, base: str = "llama", **changes) -> None:
        file(name, json.dumps({**CONFIGS[base], "vocab_size": 64, **changes}))

    network("tiny.json")
    array("data/train_000000.npy", 40_000)
    array("data/valid_000000.npy", 4_000)
    file(
        "tiny.yaml",
        "name: tiny\nworkers: 2\nsync_every: 2\nglobal_batch_size: 4\nmodel: {config: tiny.json, seq_len: 16}\n"
        "data: {path: data}\nbudget: {steps: 6}\ncompute: {threads: 1}\n",
    )
    file("syntax.yaml", "a: [1\n")
    file("binary.yaml", b"\xff\xfe\x00")
    file("tag.yaml", 'name: !!python/object/apply:os.system ["touch pwned"]\n')
    file("list.yaml", "- a\n")
    file("unknown.yaml", "wrokers: 3\n")
    file("nested.yaml", "inner: {rl: 1.0e-3}\n")
    file("scalar.yaml", "reduce: 5\n")
    file("words.yaml", "inner:\nworkers: two\n")
    file("method.yaml", "method: [a]\n")
    file("blocks.yaml", "per_method: 3\n")
    file("block_name.yaml", "per_method: {isolocco: {outer.lr: 1.0}}\n")
    file("for_isoloco.yaml", "method: isoloco\nouter: {lr: 1.0}\n")
    file("key.yaml", "recipe: quickstart\ncells: {}\ncell: 3\n")
    for name, cell in (
        ("cell", "3"), ("axis", "{tune: {inner.lr: {start: 1.0}}}"), ("option", "{inner.rl: 1.0}"),
        ("value", "{workers: 3}"),
    ):  # fmt: skip
        file(f"{name}.yaml", f"recipe: quickstart\ncells: {{a: {cell}}}\n")
    file("quickstart.yaml", "")
    file("folder.yaml/x", "")
    file("run/run.json", "{}")
    (root / "empty").mkdir()
    file("garbage/train_000000.npy", "hello world")
    file("cut/train_000000.npy", (root / "data/train_000000.npy").read_bytes()[:5000])
    file("longer/train_000000.npy", (root / "data/train_000000.npy").read_bytes() + b"xx")
    file("no_bytes/train_000000.npy", "")
    array("no_tokens/train_000000.npy", 0)
    file("newer/manifest.json", '{"format": "isoloco-shards-9"}')
    array("floats/train_000000.npy", 100, "float32")
    array("gap/train_000000.npy", 100)
    array("gap/train_000002.npy", 100)
    array("short/train_000000.npy", 50)
    array("short/valid_000000.npy", 50)
    array("no_valid/train_000000.npy", 40_000)
    for name in ("prepared", "prepared_cut", "prepared_less", "prepared_bad", "prepared_flipped"):
        shutil.copytree(shards, root / name)
    shard = (shards / "train_000000.npy").read_bytes()
    file("prepared_cut/train_000000.npy", shard[:-2])
    file("prepared_flipped/train_000000.npy", shard[:-1] + bytes([shard[-1] ^ 1]))
    (root / "prepared_less/train_000000.npy").unlink()
    file("prepared_bad/manifest.json", "{")
    file("unfinished/preparing.json", "{}")
    network("small.json", vocab_size=32)
    network("odd.json", hidden_size=30, num_attention_heads=4)
    network("words.json", hidden_size="abc")
    network("alien.json", model_type="llamma")
    network("remote.json", auto_map={"AutoModelForCausalLM": "code.Model"})
    network("positions.json", max_position_embeddings=8)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
    network("buffers.json", rope_parameters={**rope, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8})
    file("encoder.json", json.dumps({
        "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 64,
    }))  # fmt: skip
    file("untyped.json", "{}")
    file("seq2seq.json", '{"model_type": "t5"}')
    network("quantized.json", quantization_config={"quant_method": "gptq", "bits": 4})
    network("torn/config.json")
    file("torn/model.safetensors", "hello world")
    file("text.txt", "One document and no other.\n" * 30)
    file("latin.txt", "ä".encode("latin-1") * 100)
    file("lines.jsonl", '{"text": "a"}\n')
    file("no_eos.json", _tokenizer_without_eos())
    for package in ("wandb", "tensorboard"):
        file(f"not_installed/{package}.py", "raise ImportError\n")
    return root


def _tokenizer_without_eos() -> str:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if "__pycache__" not in path.parts)


def check(case: tuple[str, str], code: int | None, out: str, err: str) -> None:
    told = f"isoloco {case[0]}\nexit code {code}\n{out}\n{err}"
    assert code == 2, told
    assert out == "", told
    assert err.count("\n") == 1, told
    assert err.startswith("isoloco: "), told
    assert case[1] in err, told


def test_what_needs_no_torch_is_told_without_it(place, tmp_path):
    script = """
import contextlib, io, json, os, shlex, sys
from isoloco.cli import main
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    heavy = sorted({"torch", "transformers", "datasets", "matplotlib", "rich"} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), os.getcwd(), heavy]))
"""
    before, env = listing(place), {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    lines = "\n".join(case[0] for case in LIGHT)
    ran = subprocess.run(
        [sys.executable, "-c", script], input=lines, cwd=place, env=env, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    for case, (code, out, err, cwd, heavy) in zip(LIGHT, answers, strict=True):
        check(case, code, out, err)
        assert (Path(cwd), heavy) == (place, []), case[0]
    assert listing(place) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", HEAVY + HEAVY_TOO, ids=lambda case: case[0])
def test_error(case, place, monkeypatch, tmp_path, capsys):
    import torch

    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    before = listing(place)
    code = main(shlex.split(case[0]))
    check(case, code, *capsys.readouterr())
    assert Path.cwd() == place
    assert listing(place) == before
    assert list(tmp_path.iterdir()) == []  # where what is prepared would be kept


def test_a_dashboard_that_does_not_start_leaves_no_run(place, monkeypatch, tmp_path, capsys):
    def refuse(*_, **__):
        raise ValueError("log.wandb: Weights & Biases did not start")

    monkeypatch.chdir(place)
    monkeypatch.setattr("isoloco.tracking.open_sinks", refuse)
    code = main(["train", "tiny.yaml", "--out_dir", str(tmp_path / "run")])
    check(("train", "Weights & Biases did not start"), code, *capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


def through_command(number: int, case: tuple[str, str], place: Path, cache: Path) -> None:
    env = {
        **os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(place / "not_installed"),
    }  # fmt: skip
    line = case[0].replace("--out new", f"--out new{number}")  # two run at a time
    ran = subprocess.run([COMMAND, *shlex.split(line)], cwd=place, env=env, capture_output=True, text=True)
    check(case, ran.returncode, ran.stdout, ran.stderr)


def all_through_command(cases: list[tuple[str, str]], place: Path, cache: Path) -> None:
    before = listing(place)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: through_command(*pair, place, cache), enumerate(cases)))
    assert listing(place) == before
    assert list(cache.iterdir()) == []


def test_a_dozen_errors_through_the_command(place, tmp_path):
    cases = [case for case in LIGHT + HEAVY if case[0] in DOZEN]
    assert len(cases) == len(DOZEN) == 12
    all_through_command(cases, place, tmp_path)


@pytest.mark.slow
def test_errors_through_the_command(place, tmp_path):
    """Some of each kind, from start to exit code; all of them go through one process above."""
    all_through_command(LIGHT[::4] + HEAVY[::3], place, tmp_path)
