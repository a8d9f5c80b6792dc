"""The benchmarks of memory, speed and data run at toy size, and what they compare with does the same work."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import network, options, throughput

from isoloco.simulate import build_round
from isoloco.worker import Turn, seed_default_generators

ROOT = Path(__file__).parents[1]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def bars(path: Path) -> dict[str, dict]:
    return {bar["what"]: bar for bar in json.loads(path.read_text("utf-8"))["bars"]}


@pytest.mark.slow
def test_bare_loop_nanogpt_and_a_worker_take_the_same_steps(tmp_path):
    prepared = throughput.prepare(tmp_path, "tiny", batch=2, micro=1, compiled=False)
    bare, nano = throughput.Bare(prepared), throughput.NanoGPT(prepared)
    naive = throughput.Naive(prepared)
    prepared.config.inner.warmup_frac = 0.0
    model = throughput.build(prepared)
    training, state = build_round(
        model, throughput.loss_function(prepared.config), throughput.reader(prepared.config, prepared.data),
        config=prepared.config, total_steps=10**6,
    )  # fmt: skip
    start = flat(bare.model)
    training.worker.load(0, state.anchor, state.workers[0])
    training.worker.run(2, first_step=0, turn=Turn(), stop=lambda: False)
    for step in range(2):
        for program in (bare, nano, naive):
            program.step(0, step)
    moved = flat(bare.model) - start

    def distance(other) -> float:
        return float((flat(other) - start - moved).norm() / moved.norm())

    assert moved.norm() > 0
    assert distance(model) < 0.01  # the bare loop's decay acts on embedding and head too
    assert distance(nano.model) < 1e-3
    assert distance(naive.models[0]) < 0.02  # default AdamW decays vectors too
    assert nano.losses[0] == pytest.approx(naive.losses[1] * 2, rel=1e-4)


def test_a_worker_seeds_as_torch_does():
    with torch.random.fork_rng():
        torch.manual_seed(2**40 + 3)
        expected = torch.rand(5)
        seed_default_generators(2**40 + 3)
        assert torch.equal(torch.rand(5), expected)


@pytest.mark.slow
def test_throughput(tmp_path):
    run("benchmarks.throughput", "--toy", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "throughput.json").read_text("utf-8"))["rows"]
    assert [row["program"] for row in rows] == [
        "isoloco", "bare loop", "nanoGPT-style loop", "naive", "isoloco", "isoloco, exact",
    ]  # fmt: skip
    assert all(row["step_s"] > 0 for row in rows)
    assert rows[1]["of_bare"] == 1
    assert 0 < rows[0]["share_beside"] < 1


@pytest.mark.slow
def test_tokenize(tmp_path):
    run("benchmarks.tokenize", "--toy", "--out", str(tmp_path))
    found = bars(tmp_path / "tokenize.json")
    assert found["the same tokens"]["passed"]
    assert found["less than 600 MB"]["passed"]


@pytest.mark.slow
def test_options(tmp_path):
    run("benchmarks.options", "--toy", "--out", str(tmp_path))
    rows = {row["option"]: row for row in json.loads((tmp_path / "options.json").read_text("utf-8"))["rows"]}
    assert set(rows) == set(options.TOY_VARIANTS)
    assert all(row["step_s"] > 0 and row["turn_s"] > 0 for row in rows.values())
    chunked = rows["vocabulary 32000, compute.loss_kernel chunked"]
    assert chunked["peak_change_MB"] < 0  # against the plain kernel above it


@pytest.mark.parametrize("option", [name for name in options.VARIANTS if "." in name])
def test_options_are_told_by_their_names(option):
    key, value = option.split(", ")[-1].split(" ")
    assert str(options.VARIANTS[option][key.removeprefix("compute.")]).lower() == value


@pytest.mark.slow
def test_open_data(tmp_path):
    run("benchmarks.open_data", "--toy", "--out", str(tmp_path))
    [row] = json.loads((tmp_path / "open_data.json").read_text("utf-8"))["rows"]
    assert row["rows"] == 3 * 2**16 // 128


@pytest.mark.slow
def test_large_model(tmp_path):
    run("benchmarks.large_model", "--toy", "--place", str(tmp_path), "--out", str(tmp_path))
    found = bars(tmp_path / "large_model.json")
    assert all(bar["passed"] for bar in found.values())
    [row] = json.loads((tmp_path / "large_model.json").read_text("utf-8"))["rows"]
    assert row["disk_GB"] > 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # the run is gone


@pytest.mark.slow
def test_family_prints_one_table_and_writes_json(tmp_path):
    names = "polar,memory" + (",wire_bytes" if network.available() else "")
    done = run("benchmarks", "--toy", "--only", names, "--out", str(tmp_path))
    result = json.loads((tmp_path / "benchmarks.json").read_text("utf-8"))
    assert list(result["benchmarks"]) == names.split(",")
    assert {"cpu", "threads", "torch"} <= result["machine"].keys()
    for name, each in result["benchmarks"].items():
        assert each["measured"], each["ended"]
        assert (tmp_path / f"{name}.json").is_file()
        assert all(bar["what"] in done.stdout for bar in each["bars"])


@pytest.mark.slow
def test_family_tells_what_it_takes():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--only takes polar,outer_step,memory,throughput,tokenize,open_data,wire_bytes, got nothing" in done.stderr


@pytest.mark.slow
def test_gpu_script_runs_at_toy_size_on_the_cpu(tmp_path):
    run("benchmarks.gpu", "--toy", "--parts", "outer_step,throughput,memory", "--out", str(tmp_path))
    result = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert list(result["parts"]) == ["outer_step", "throughput", "memory"]
    assert {row["polar"] for row in result["parts"]["outer_step"]["rows"]} >= {"svd", "newton_schulz"}
    assert [row["outer_step"] for row in result["parts"]["throughput"]["rows"]] == ["fast", "svd"]
    memory = result["parts"]["memory"]["rows"][0]
    assert memory["workers"] == 2
    assert memory["predicted_GB"] > 0


# -- the page

PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"<!-- (\w+)\.csv: (.*?) -->\n\n((?:\|.*\n)+)")


def agrees(cell: str, value: str) -> bool:
    """Whether a cell of the page is a value of the results, rounded to as many digits as it shows."""
    if not re.fullmatch(r"[-+]?[\d,]+(\.\d+)?( %)?", cell):
        return cell == value
    number, percent, _ = cell.replace(",", "").partition(" %")
    digits = len(number.partition(".")[2])
    return value != "" and abs(float(value) * (100 if percent else 1) - float(number)) <= 0.5001 * 10**-digits


@pytest.mark.parametrize(("name", "columns", "table"), TABLE.findall(PAGE.read_text("utf-8")))
def test_figures_of_the_page_are_those_of_the_rows(name, columns, table):
    """The comment above a table names its file and its columns there."""
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for line in table.splitlines()[2:]:
        cells = dict(zip(columns.split(", "), (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        assert any(all(agrees(cell, row[key]) for key, cell in cells.items()) for row in rows), line


def test_every_table_of_the_page_has_its_rows():
    text = PAGE.read_text("utf-8")
    assert len(re.findall(r"^\|(?:-+\|)+$", text, re.M)) == len(TABLE.findall(text)) > 6


def test_a_cell_agrees_with_what_it_rounds():
    assert agrees("8.3", "8.34")
    assert agrees("1,145", "1145")
    assert agrees("2.0 %", "0.0196")
    assert not agrees("8.4", "8.34")
    assert not agrees("newton_schulz", "gram")
    assert not agrees("1", "")
