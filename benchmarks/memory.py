"""Memory of a training against the number of its workers: peak resident bytes of the process, and the slope.

    python -m benchmarks.memory [--toy] [--out DIR]

The 21 M parameter Llama (512 x 6, MLP 1376, vocabulary 2048), one process, two rounds of one step, each run a process
of its own through the command; ru_maxrss, which counts mapped files that are resident. The slope is least squares over
W = 1, 2, 4, 8, 16. The authors' code holds four copies of the model for each simulated worker and a little more: 16.9
bytes per parameter and worker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Bar, report

WORKERS = (1, 2, 4, 8, 16)
AUTHORS_BYTES = 16.9


def measure(workers: int, state: str, *, preset: str) -> dict[str, Any]:
    """Peak resident bytes of one run, its parameters and its speed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = {
            "method": "isoloco", "workers": workers, "global_batch_size": 16, "micro_batch_size": 1, "sync_every": 1,
            "model.preset": preset, "model.seq_len": 32, "budget.steps": 2, "eval.tokens": 1024,
            "compute.worker_state": state, "compute.threads": 1, "checkpoint.every_rounds": 0, "checkpoint.best": False,
            "log.spectra_every_rounds": 0, "out_dir": str(run), "transform.options": '{"polar": "newton_schulz"}',
        }  # fmt: skip
        argv = [sys.executable, "-m", "isoloco", "train", "quickstart", *(f"--{k}={v}" for k, v in options.items())]
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise OSError(f"the run with {workers} workers failed")
        unit = 1 if sys.platform == "darwin" else 1024
        manifest = json.loads((run / "run.json").read_text("utf-8"))
        speed = manifest["summary"]["tokens_per_s"]
        return {"peak": usage.ru_maxrss * unit, "parameters": manifest["parameters"], "tokens/s": speed}


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Least squares."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    for state in ("disk",) if toy else ("device", "disk"):
        points = []
        for workers in WORKERS[:2] if toy else WORKERS:
            each = measure(workers, state, preset="tiny" if toy else "21m")
            points.append((workers, each["peak"] / each["parameters"]))
            rows.append({
                "state": state, "workers": workers, "peak_MB": each["peak"] / 1e6,
                "bytes/parameter": points[-1][1], "tokens/s": each["tokens/s"],
            })  # fmt: skip
        found[state] = slope(points)
    told = f"bytes per parameter and worker (the authors' code: {AUTHORS_BYTES})"
    bars = [Bar(what="at most 0.5 with state on disk", measured=f"{found['disk']:.2f}", passed=found["disk"] <= 0.5)]
    if not toy:
        device = found["device"]
        bars.insert(0, Bar(what=f"at most 8.5 {told}", measured=f"{device:.2f}", passed=device <= 8.5))
    return rows, bars


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a 1.3 M parameter model, states on disk")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (%(default)s)")
    args = parser.parse_args(argv)
    rows, bars = run(toy=args.toy)
    return report("memory", rows, bars, out=args.out)


if __name__ == "__main__":
    raise SystemExit(main())
