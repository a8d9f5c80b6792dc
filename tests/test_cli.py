"""The command line: help, recipes, what is printed where, the whole way from a text to a held-out loss, Ctrl-C."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

from isoloco import cli
from isoloco.recipe import build_config, packaged
from tiny_models import config_file

COMMANDS = ["train", "prepare", "evaluate", "merge", "study", "compare", "plan", "methods", "recipes"]


def run(*argv: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "isoloco", *argv], capture_output=True, text=True, **options)


def succeed(capsys, *argv: str) -> str:
    """What a command that works prints; nothing of it on standard error."""
    try:
        code = cli.main(list(argv))
    except SystemExit as end:  # argparse's own, after its help
        code = end.code
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


# -- help


def test_help_names_every_command_and_an_example_of_it(capsys):
    assert set(cli.COMMANDS) == set(COMMANDS)
    text = succeed(capsys, "--help")
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S.* isoloco {command} ", text, re.MULTILINE), command
    assert succeed(capsys) == succeed(capsys, "-h") == succeed(capsys, "help") == text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = succeed(capsys, command, "--help")
    assert text.startswith(f"usage: isoloco {command}")
    assert f"examples:\n  isoloco {command}" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "==SUPPRESS==" not in text


# -- recipes


def test_a_recipe_is_listed_and_copied(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = succeed(capsys, "recipes").splitlines()
    assert [line.split()[0] for line in listed] == list(packaged("recipes"))
    assert all(len(line.split()) > 5 for line in listed)
    assert "isoloco train quickstart.yaml" in succeed(capsys, "recipes", "--copy", "quickstart")
    assert os.listdir() == ["quickstart.yaml"]
    copied, sources = build_config("quickstart.yaml", {})
    assert copied == build_config("quickstart", {})[0]
    assert set(sources.values()) == {"quickstart.yaml"}


PAPERS = {  # inner lr, weight decay, outer lr, outer momentum: Tables 6 and 7 at R = 8, Appendix A
    ("178m", "dp"): (0.00195, 0.15, None, None),
    ("178m", "diloco"): (0.00138, 0.1, 0.7, 0.9),
    ("178m", "isoloco"): (0.00138, 0.1, 1.8, 0.8),
    ("512m", "dp"): (0.00276, 0.125, None, None),
    ("512m", "diloco"): (0.000691, 0.1, 0.7, 0.9),
    ("512m", "isoloco"): (0.00138, 0.1, 1.8, 0.8),
}


@pytest.mark.parametrize(("recipe", "method"), PAPERS)
def test_the_papers_recipes_have_the_papers_values(recipe, method):
    config, _ = build_config(recipe, {"method": method})
    found = (config.inner.lr, config.inner.weight_decay, config.outer.lr, config.outer.momentum)
    assert found == PAPERS[recipe, method]
    assert (config.model.preset, config.model.seq_len) == (recipe, 2048)
    assert (config.workers, config.sync_every) == (8, 30)
    assert config.global_batch_size * 2048 == {"178m": 2**19, "512m": 2**21}[recipe]
    assert (config.inner.optimizer, config.inner.betas, config.inner.warmup_frac) == ("adamw", (0.9, 0.95), 0.1)
    assert config.budget.tokens_per_parameter == 20
    assert config.data.source == "mlfoundations/dclm-baseline-1.0-parquet"
    assert config.data.tokenizer == "togethercomputer/LLaMA-2-7B-32K"
    assert config.data.valid_tokens == 100e6


@pytest.mark.parametrize("recipe", ["178m", "512m"])
def test_the_papers_recipes_prepare_a_little_more_than_their_budget(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = succeed(capsys, "plan", recipe)
    parameters = int(re.search(r"^model +([\d,]+) parameters", text, re.MULTILINE)[1].replace(",", ""))
    budget = int(re.search(r"^budget +([\d,]+) tokens", text, re.MULTILINE)[1].replace(",", ""))
    assert parameters == pytest.approx(float(recipe.removesuffix("m")) * 1e6, rel=5e-3)
    assert budget == pytest.approx(20 * parameters, rel=1e-3)
    prepared = build_config(recipe, {})[0].data.max_tokens
    assert budget < prepared < 1.02 * budget
    assert list(tmp_path.iterdir()) == []  # a plan prepares nothing


# -- methods and plan


def test_methods_are_told_in_rows_and_one_by_one(capsys):
    everything = succeed(capsys, "methods")
    for name in ("dp", "isoloco", "ties", "clip_low"):
        assert re.search(rf"^  {name} ", everything, re.MULTILINE)
    one = succeed(capsys, "methods", "isoloco")
    assert re.search(r"^  outer.lr +1.8$", one, re.MULTILINE)
    rule = succeed(capsys, "methods", "clip_high")
    assert all(re.search(rf"^  {key} +\S", rule, re.MULTILINE) for key in ("equation", "scale", "cost", "source"))
    both = succeed(capsys, "methods", "ties")  # a method and a reduce of one name
    assert "ties: outer SGD" in both
    assert "ties (reduce): TIES" in both
    assert "density: a number above 0 and at most 1 (default 0.9)" in both


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shards) -> Path:
    """A recipe of a run that takes seconds, beside its network; the data is prepared."""
    root = tmp_path_factory.mktemp("cli")
    tree = {
        "name": "own", "workers": 2, "sync_every": 5, "global_batch_size": 4, "budget": {"steps": 20},
        "model": {"config": config_file("llama", root), "seq_len": 16}, "data": {"path": str(shards)},
        "per_method": {"isoloco": {"inner.lr": 2e-3}}, "compute": {"threads": 1}, "eval": {"every_rounds": 2},
    }  # fmt: skip
    (root / "own.yaml").write_text(yaml.safe_dump(tree))
    return root


def test_a_plan_tells_what_a_run_takes_and_leaves_nothing(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = succeed(capsys, "plan", str(folder / "own.yaml"), "--method", "diloco")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert rows["method"] == "diloco"
    assert rows["budget"] == "1,280 tokens, 4 rounds of H = 5 inner steps"
    assert rows["workers"] == "W = 2, each 2 of 4 sequences of 16"
    assert "5x fewer than data-parallel" in rows["wire"]
    assert {"model", "data", "compute", "memory", "checkpoint"} < rows.keys()
    assert list(tmp_path.iterdir()) == []


# -- what is printed, and where


def test_a_pipe_that_is_closed_ends_it_in_silence():
    read, write = os.pipe()
    os.close(read)
    with contextlib.closing(os.fdopen(write, "wb")) as closed:
        ran = subprocess.run([sys.executable, "-m", "isoloco", "recipes"], stdout=closed, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_warnings_are_a_line_of_our_own_and_nothing_of_libraries(capsys, monkeypatch):
    def warn(argv: list[str]) -> int:
        for module in ("isoloco.model", "torch.nn"):
            warnings.warn_explicit(f"of {module}\nin two lines", UserWarning, "file.py", 1, module=module, registry={})
        return 0

    monkeypatch.setitem(cli.COMMANDS, "methods", warn)
    assert cli.main(["methods"]) == 0
    assert capsys.readouterr() == ("", "isoloco: warning: of isoloco.model in two lines\n")


def test_a_file_that_cannot_be_read_is_named(capsys, monkeypatch):
    def fail(argv: list[str]) -> int:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setitem(cli.COMMANDS, "methods", fail)
    assert cli.main(["methods"]) == 2
    assert capsys.readouterr() == ("", "isoloco: some/file: Permission denied\n")


# -- the whole way


@pytest.mark.slow
def test_from_a_text_to_a_held_out_loss(folder, tmp_path):
    documents = [f"Document {i} says that {i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)]
    (tmp_path / "own.txt").write_text("<|endoftext|>\n".join(documents))
    prepared = run("prepare", "own.txt", "--tokenizer", "train:bpe:300", "--out", "data own", cwd=tmp_path)
    assert (prepared.returncode, prepared.stderr) == (0, "")
    assert prepared.stdout == "prepared data own; train on it: isoloco train quickstart --data.path 'data own'\n"

    train = ("train", str(folder / "own.yaml"), "--data.path", "data own", "--outer.lr", "1.5", "--budget.steps=20")
    trained = run(*train, cwd=tmp_path)
    assert (trained.returncode, trained.stderr) == (0, "")
    for told in (
        "parameters", "rounds of H = 5", "predicted", "fewer than data-parallel", "Not defaults", "command line",
        "valid loss", "bits per byte", "tokens/s", "by each worker", "wall time", "Files", "Next", "Sample",
    ):  # fmt: skip
        assert told in trained.stdout, told
    assert len(re.findall(r"^. method  ", trained.stdout, re.MULTILINE)) == 1
    assert max(map(len, trained.stdout.splitlines())) <= 120
    assert "\x1b" not in trained.stdout

    run_dir = tmp_path / "runs/own-1"
    comments = [line[2:].strip() for line in (run_dir / "config.yaml").read_text().splitlines() if line.startswith("#")]
    sources = dict(line.split(": ", 1) for line in comments if ": " in line)
    assert {"workers", "inner.lr", "model.seq_len"} < set(sources[str(folder / "own.yaml")].split(", "))
    assert set(sources["command line"].split(", ")) == {"data.path", "outer.lr", "budget.steps"}
    assert {"outer.momentum", "reduce.name"} < set(sources["method isoloco"].split(", "))
    assert sources["derived"] == "micro_batch_size"
    assert {"compute.device", "compute.precision", "transform.options"} <= set(sources["this machine"].split(", "))
    assert json.loads((run_dir / "run.json").read_text())["state"] == "finished"

    # the commands that it gives to try next
    [command] = re.findall(r"^  isoloco (evaluate .*)$", trained.stdout, re.MULTILINE)
    evaluated = run(*command.split(), cwd=tmp_path)
    assert (evaluated.returncode, evaluated.stderr) == (0, "")
    assert evaluated.stdout.startswith("loss ")
    last = json.loads((run_dir / "run.json").read_text())["summary"]["valid_loss_last"]
    same = run("evaluate", "runs/own-1", cwd=tmp_path).stdout
    assert float(re.match(r"loss ([\d.]+) nats", same)[1]) == pytest.approx(last, abs=1e-5)
    elsewhere = run("evaluate", "runs/own-1/model", "--data", "data own", "--seq-len", "16", cwd=tmp_path)
    assert elsewhere.stdout == same

    # a second run has a directory of its own
    assert run(*train, "--method", "dp", cwd=tmp_path).returncode == 2  # the outer lr of the command line
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["own-1"]
    again = run(*train[:4], "--method", "dp", "--budget.steps=5", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["own-1", "own-2"]


# -- Ctrl-C


def heed_interrupts() -> None:
    """A shell that runs the tests in the background has them ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Started:
    """A command in a process of its own, whose standard error is read line by line."""

    def __init__(self, *argv: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isoloco", *argv],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        )

    def wait_for(self, ready) -> None:
        end = time.monotonic() + 240
        while not ready():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=240)
        code = self.process.returncode
        # CPython dies of the signal itself, a shell's 130, where it met the interrupt in exec() of a string
        return 130 if code == -signal.SIGINT else code, out, err


def finished_rounds(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count('"kind": "round"') if metrics.exists() else 0


LONG = ("--budget.steps", "100000", "--data.epochs", "1000")


@pytest.mark.slow
def test_interrupted_training_ends_with_a_model_and_a_table(folder, tmp_path):
    started = Started("train", str(folder / "own.yaml"), *LONG, cwd=tmp_path)
    run_dir = tmp_path / "runs/own-1"
    started.wait_for(lambda: finished_rounds(run_dir) >= 2)
    started.interrupt()
    code, out, err = started.end()
    assert code == 130
    assert err == "\nisoloco: saving and ending with what there is; Ctrl-C again leaves at once\n"
    assert "Run stopped" in out
    assert "isoloco train --resume runs/own-1" in out
    manifest = json.loads((run_dir / "run.json").read_text())
    assert (manifest["state"], manifest["error"]) == ("stopped", None)
    assert manifest["summary"]["rounds"] >= 2
    evaluated = run("evaluate", "runs/own-1", cwd=tmp_path)
    loss = float(re.match(r"loss ([\d.]+) nats", evaluated.stdout)[1])
    assert loss == pytest.approx(manifest["summary"]["valid_loss_last"], abs=1e-5)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(folder, tmp_path):
    # an evaluation long enough to be interrupted
    tokens = np.random.default_rng(0).integers(0, 64, 4_000_000).astype("uint16")
    for split, part in (("train", tokens[:100_000]), ("valid", tokens)):
        (tmp_path / "data").mkdir(exist_ok=True)
        np.save(tmp_path / f"data/{split}_000000.npy", part)
    options = (*LONG, "--data.path", "data", "--eval.every_rounds", "0")
    started = Started("train", str(folder / "own.yaml"), *options, cwd=tmp_path)
    run_dir = tmp_path / "runs/own-1"
    started.wait_for(lambda: finished_rounds(run_dir) >= 1)
    started.interrupt()
    first = started.process.stderr.readline() + started.process.stderr.readline()
    assert "Ctrl-C again leaves at once" in first
    started.interrupt()
    code, out, err = started.end()
    assert (code, err) == (130, "isoloco: interrupted\n")
    assert "Run stopped" not in out
    assert json.loads((run_dir / "run.json").read_text())["state"] == "stopped"
    assert not (run_dir / "model").exists()


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_leaves_at_once(folder, tmp_path):
    # authors' shards are read whole at the start: time to interrupt
    (tmp_path / "data").mkdir()
    for split, size in (("train", 300_000_000), ("valid", 10_000)):
        path = tmp_path / f"data/{split}_000000.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype="uint16", shape=(size,))  # a file of zeros takes no space
    started = Started("train", str(folder / "own.yaml"), "--data.path", "data", cwd=tmp_path)
    maps = Path(f"/proc/{started.process.pid}/maps")
    if not maps.exists():
        started.process.kill()
        pytest.skip("needs /proc to see when the process has begun to read")
    started.wait_for(lambda: "libtorch" in maps.read_text())
    time.sleep(0.5)
    started.interrupt()
    code, out, err = started.end()
    assert (code, out, err) == (130, "", "isoloco: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


@pytest.mark.slow
def test_an_interrupted_preparation_goes_on_and_gives_the_same_bytes(tmp_path):
    rng = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(5000)])
    with (tmp_path / "big.txt").open("w") as file:
        for i in range(4000):
            file.write(f"{i} " + " ".join(rng.choice(words, 400)) + "\n<|endoftext|>\n")
    (tmp_path / "small.txt").write_text(
        "\n<|endoftext|>\n".join(f"{i} " + " ".join(words[i : i + 9]) for i in range(3000))
    )
    tokenizer = run("prepare", "small.txt", "--tokenizer", "train:bpe:600", "--out", "small", cwd=tmp_path)
    assert tokenizer.returncode == 0
    argv = ("prepare", "big.txt", "--tokenizer", "small/tokenizer", "--valid-tokens", "1e4", "--out")
    started = Started(*argv, "stopped", cwd=tmp_path)
    state = tmp_path / "stopped/preparing.json"
    started.wait_for(lambda: state.exists() and list((tmp_path / "stopped").glob("train_*.partial")))
    started.interrupt()
    code, out, err = started.end()
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "isoloco: interrupted; the same command goes on from there"
    assert state.exists()
    assert run(*argv, "stopped", cwd=tmp_path).returncode == 0
    assert run(*argv, "whole", cwd=tmp_path).returncode == 0
    for path in sorted((tmp_path / "whole").rglob("*")):
        if path.is_file():
            assert (tmp_path / "stopped" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes(), path
