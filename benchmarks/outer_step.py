"""A whole IsoLoCo outer step at the 178M model's shapes, against the naive one: CPU time of one thread, extra memory.

    python -m benchmarks.outer_step [--toy] [--out DIR]

The step: mean of 8 workers' deltas, Iso-C, Nesterov momentum, for 36 matrices of 1024x1024, 18 of 2688x1024, 9 of
1024x2688 and 2 of 32000x1024. Ours adds the deltas up as they come (encode, decode) and calls OuterOptimizer; the
naive one stacks all 8, takes the SVD of their mean as it lies, multiplies U diag(mean) V^T out, then calls torch's SGD.
Both go one matrix at a time, so neither holds a stack or a delta of the whole model. Every step runs in a process of
its own, in turn; the time is the median, the extra memory how far the step raises the process's peak above what it
found: anchor, momentum and the workers' deltas (matrices of one shape share these; the model's own would be 5.7 GB).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Bar, cpu_seconds, has_bf16, report
from isoloco.outer import IsoLoCo
from isoloco.rules import bind_reduce

WORKERS = 8
SHAPES = {(1024, 1024): 36, (2688, 1024): 18, (1024, 2688): 9, (32000, 1024): 2}
TOY_SHAPES = {(24, 24): 2, (64, 24): 1, (24, 64): 1, (320, 24): 1}
OURS = {"exact": "auto", "fast": "newton_schulz", "fast bf16": "newton_schulz_bf16"}


def ours(anchor: list[Tensor], deltas: dict[torch.Size, list[Tensor]], optimizer: IsoLoCo) -> None:
    reduce = bind_reduce("mean")
    for p in anchor:
        total_KS: Tensor | None = None
        for delta_S in deltas[p.shape]:
            coded_KS = reduce.encode(delta_S, weight=1.0)
            total_KS = coded_KS.clone() if total_KS is None else total_KS.add_(coded_KS)
        assert total_KS is not None
        p.grad = reduce.decode(total_KS, float(WORKERS))
        del total_KS, coded_KS
        optimizer.step()
        p.grad = None


def naive(anchor: list[Tensor], deltas: dict[torch.Size, list[Tensor]], optimizer: torch.optim.SGD) -> None:
    for p in anchor:
        delta_MN = torch.stack(deltas[p.shape]).mean(0)
        u_MR, sigma_R, vh_RN = torch.linalg.svd(delta_MN, full_matrices=False)
        p.grad = torch.linalg.multi_dot([u_MR, torch.diag(sigma_R.mean().expand(len(sigma_R))), vh_RN])
        optimizer.step()
        p.grad = None


def one_step(variant: str, shapes: dict[tuple[int, int], int]) -> dict[str, Any]:
    """Run one step in this process; seconds, extra bytes, and a number that says what the step did."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    deltas = {
        torch.Size(shape): [torch.empty(shape).normal_(generator=generator) for _ in range(WORKERS)] for shape in shapes
    }
    # written to, so that its pages count from the start
    anchor = [torch.full(shape, 0.5) for shape, count in shapes.items() for _ in range(count)]
    if variant == "naive":
        optimizer = torch.optim.SGD(anchor, lr=1.8, momentum=0.8, nesterov=True)
    else:
        optimizer = IsoLoCo(anchor, lr=1.8, momentum=0.8, polar=OURS[variant])
    for p in anchor:
        optimizer.state[p]["momentum_buffer"] = torch.full(p.shape, 0.25)
    before = _peak_bytes()
    step = naive if variant == "naive" else ours
    seconds, _ = cpu_seconds(lambda: step(anchor, deltas, optimizer))  # type: ignore[arg-type]
    extra_bytes = _peak_bytes() - before
    moved = [p.sub(0.5) for p in anchor[:: max(1, len(anchor) // 4)]]
    return {"cpu_s": seconds, "extra_bytes": extra_bytes, "moved": [float(move.norm()) for move in moved]}


def _peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_own_process(variant: str, *, toy: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.outer_step", "--variant", variant, *(["--toy"] if toy else [])]
    root = Path(__file__).parents[1]
    return json.loads(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout)


def bars(rows: list[dict[str, Any]], *, toy: bool) -> list[Bar]:
    by_variant = {row["step"]: row for row in rows}

    def speed(variant: str, what: str, least: float) -> Bar:
        if variant not in by_variant:
            return Bar(what=what, measured="no bf16 instructions here", passed=None)
        times = by_variant[variant]["times_faster"]
        return Bar(what=what, measured=f"{times:.2f} times", passed=None if toy else times >= least)

    share = by_variant["exact"]["extra_memory_share"]
    memory = Bar(
        what="exact with at most 1/4 of the extra memory",
        measured=f"{share:.3f}",
        passed=None if toy else share <= 0.25,
    )
    return [
        speed("exact", "exact at least 1.3 times faster", 1.3),
        memory,
        speed("fast bf16", "fast at least 2 times faster, with bf16 instructions", 2.0),
        speed("fast", "fast at least 1.2 times faster, without", 1.2),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_step", description="IsoLoCo's outer step.")
    parser.add_argument(
        "--toy", action="store_true", help="tiny matrices: shows that it runs, its numbers mean nothing"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help=f"directory of the results (default: {RESULTS.name})")
    parser.add_argument("--variant", choices=["naive", *OURS], help="one step in this process, as JSON")
    options = parser.parse_args(argv)
    if options.variant:
        print(json.dumps(one_step(options.variant, TOY_SHAPES if options.toy else SHAPES)))
        return 0
    torch.set_num_threads(1)
    variants = ["naive", *(name for name in OURS if name != "fast bf16" or has_bf16())]
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(1 if options.toy else options.repeats):
        for variant in variants:
            runs[variant].append(in_own_process(variant, toy=options.toy))
    seconds = {variant: statistics.median(run["cpu_s"] for run in done) for variant, done in runs.items()}
    extra = {variant: statistics.median(run["extra_bytes"] for run in done) for variant, done in runs.items()}
    rows = [
        {
            "step": variant,
            "cpu_s": seconds[variant],
            "times_faster": seconds["naive"] / seconds[variant],
            "extra_mb": extra[variant] / 1e6,
            "extra_memory_share": extra[variant] / max(1, extra["naive"]),
            "largest_difference": max(
                abs(a / b - 1) for a, b in zip(runs[variant][0]["moved"], runs["naive"][0]["moved"], strict=True)
            ),
        }
        for variant in variants
    ]
    out = options.out or (None if options.toy else RESULTS)
    return report("outer_step", rows, bars(rows, toy=options.toy), out=out)


if __name__ == "__main__":
    raise SystemExit(main())
