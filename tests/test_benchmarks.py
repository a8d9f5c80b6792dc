"""The benchmarks of memory, speed and data run at toy size, and what they compare with does the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import network, throughput

from isoloco.simulate import build_round
from isoloco.worker import Turn

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
    assert "--only takes polar,outer_step,memory,throughput,tokenize,wire_bytes, got nothing" in done.stderr


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
