"""The benchmarks of the mathematics run, at toy size, and write what they print."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_toy(name: str, out: Path) -> tuple[str, dict, list[dict[str, str]]]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--toy", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    with (out / f"{name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result["rows"])
    assert list(rows[0]) == list(result["rows"][0])
    assert {"cpu", "threads", "torch"} <= result["machine"].keys()
    return done.stdout, result, rows


def test_polar(tmp_path):
    printed, result, rows = run_toy("polar", tmp_path)
    assert {row["spectrum"] for row in rows} == {"flat", "k^-0.5", "k^-1", "exponential", "Gaussian"}
    assert {"torch SVD", "svd", "gram", "newton_schulz", "polar_express"} <= {row["method"] for row in rows}
    scale_bars = [bar for bar in result["bars"] if bar["what"].startswith("scale within")]
    assert len(scale_bars) == 2
    assert all(bar["passed"] for bar in scale_bars)
    for row in result["rows"]:
        if row["method"] == "gram" and row["spectrum"] != "exponential":
            assert row["uv_error"] < 1e-5
        assert row["shape"] in printed


@pytest.mark.slow
def test_outer_step(tmp_path):
    printed, result, rows = run_toy("outer_step", tmp_path)
    assert [row["step"] for row in rows][:3] == ["naive", "exact", "fast"]
    assert float(rows[1]["largest_difference"]) < 1e-4
    assert float(rows[2]["largest_difference"]) < 0.05
    assert all(bar["passed"] is None for bar in result["bars"])
    assert "exact at least 1.3 times faster" in printed
