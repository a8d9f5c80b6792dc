"""What each option of speed and memory does to a step at 21 M parameters: seconds, CPU seconds, peak memory.

    python -m benchmarks.options [--toy] [--out DIR]

W = 2 workers, 8 sequences of 128 a step, one thread where nothing else is said; one option at a time against the plain
run above it, each in a process of its own. A round of one step warms up, then a round of three is measured: a step is
the median, a turn is what a worker's turn has beside its steps (its state taken and put, the anchor copied, the delta
added), in wall seconds. Times faster are of CPU seconds; for two threads of wall seconds, which want a machine that
does nothing else. The loss kernels run over 32000 vocabulary entries.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, Bar, has_bf16, report
from isoloco import model as models
from isoloco.config import BudgetConfig, ComputeConfig, DataConfig, ModelConfig, RunConfig
from isoloco.data.feed import reader
from isoloco.launch import traced
from isoloco.loss import loss_function
from isoloco.outline import prepare_run
from isoloco.shelf import make_shelf
from isoloco.simulate import build_round

WORKERS, BATCH, SEQ_LEN, STEPS = 2, 8, 128, 3
SMALL, LARGE = 2048, 32000  # vocabularies
# name of the row: options of compute, and what is not one
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "AdamW not fused": {"fused": False},
    "compute.compile true": {"compile": True},
    "compute.precision bf16-mixed": {"precision": "bf16-mixed"},
    "compute.activation_checkpointing true": {"activation_checkpointing": True},
    "compute.worker_state disk": {"worker_state": "disk"},
    "compute.threads 2": {"threads": 2},
    "--profile": {"profile": True},
    "vocabulary 32000, compute.loss_kernel plain": {"vocabulary": LARGE, "loss_kernel": "plain"},
    "vocabulary 32000, compute.loss_kernel chunked": {"vocabulary": LARGE, "loss_kernel": "chunked"},
}
TOY_VARIANTS = ("plain", *list(VARIANTS)[-2:])


def member(options: dict[str, Any], *, preset: str, steps: int = STEPS) -> dict[str, float]:
    """In a process of its own: the figures of one row."""
    vocabulary, fused = options.pop("vocabulary", SMALL), options.pop("fused", True)
    profile = options.pop("profile", False)
    compute = replace(ComputeConfig(device="cpu", threads=1, precision="32-true"), **options)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tokens = np.random.default_rng(0).integers(0, vocabulary, 2**18, dtype=np.uint16)
        np.save(place / "train_000000.npy", tokens)
        np.save(place / "valid_000000.npy", tokens[: 4 * SEQ_LEN])
        config = RunConfig(
            method="isoloco_fast", workers=WORKERS, global_batch_size=WORKERS * BATCH, micro_batch_size=BATCH,
            model=ModelConfig(preset=preset, seq_len=SEQ_LEN), data=DataConfig(path=str(place), epochs=1000),
            budget=BudgetConfig(steps=100), compute=compute,
        )  # fmt: skip
        prepared = prepare_run(config)
        config = prepared.config
        torch.set_num_threads(config.compute.threads or 1)
        model = models.build(config, vocab_size=vocabulary)
        if config.compute.activation_checkpointing:
            models.checkpoint_activations(model)
        read = reader(config, prepared.data)
        marks: list[tuple[str, float, float]] = []

        def mark(phase: str) -> None:
            marks.append((phase, time.perf_counter(), time.process_time()))

        def read_marked(worker: int, step: int) -> Any:
            mark("begin")
            return read(worker, step)

        def observe(phase: str, **info: Any) -> None:
            if phase in ("turn", "inner", "reduce"):
                mark(phase)

        def own(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

        training, state = build_round(
            model, loss_function(config), read_marked, config=config, total_steps=100, observe=observe,
            weight_fn=lambda rows_BT: float(rows_BT.numel() - len(rows_BT)), inner=None if fused else own,
            shelf=make_shelf(config.compute.worker_state, folder=place / "states", device="cpu"),
        )  # fmt: skip
        training.run(state, steps=1)
        marks.clear()
        with traced(place / "trace.json.gz") if profile else nullcontext():
            training.run(state, steps=steps)
        training.shelf.close()
    pairs = list(itertools.pairwise(marks))
    taken = [(b[1] - a[1], b[2] - a[2]) for a, b in pairs if a[0] == "begin" and b[0] == "inner"]
    # from the start of a turn to its first step, and from its last step to the next turn or the reduction
    beside = [b[1] - a[1] for a, b in pairs if a[0] == "turn" or b[0] in ("turn", "reduce")]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    wall_s, cpu_s = (statistics.median(each) for each in zip(*taken, strict=True))
    return {"step_s": wall_s, "step_cpu_s": cpu_s, "turn_s": sum(beside) / WORKERS, "peak": peak}


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    rows: list[dict[str, Any]] = []
    root, preset = Path(__file__).parents[1], "tiny" if toy else "21m"
    plain: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        if toy and name not in TOY_VARIANTS:
            continue
        command = [sys.executable, "-m", "benchmarks.options", "--member", json.dumps(options), preset]
        command += ["--toy"] * toy
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if name == "plain" or name.endswith("kernel plain"):
            plain = found
        clock = "step_s" if "threads" in options else "step_cpu_s"
        rows.append({
            "option": name, "step_s": found["step_s"], "step_cpu_s": found["step_cpu_s"],
            "times_faster": plain[clock] / found[clock], "turn_s": found["turn_s"],
            "peak_MB": found["peak"] / 1e6, "peak_change_MB": (found["peak"] - plain["peak"]) / 1e6,
        })  # fmt: skip
    cost, saved = rows[-1]["step_cpu_s"] / rows[-2]["step_cpu_s"] - 1, -rows[-1]["peak_change_MB"]
    told = "" if has_bf16() else " (no bf16 instructions here: bf16-mixed is emulated)"
    return rows, [
        Bar(what="chunked loss: less memory, at most 5 % more CPU time", measured=f"{saved:.0f} MB, {cost:+.1%}{told}",
            passed=None if toy else saved > 0 and cost <= 0.05),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a small model, few options: its numbers mean nothing")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    parser.add_argument("--member", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.member:
        print(json.dumps(member(json.loads(args.member[0]), preset=args.member[1], steps=1 if args.toy else STEPS)))
        return 0
    rows, bars = run(toy=args.toy)
    return report("options", rows, bars, out=args.out or (None if args.toy else RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
