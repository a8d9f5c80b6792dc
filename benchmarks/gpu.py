"""All that wants a GPU, in under eight minutes on one: tests, outer step, throughput, end to end, memory; one JSON.

    python -m benchmarks.gpu [--toy] [--out DIR]

1. the tests marked gpu
2. IsoLoCo's outer step at the shapes of 178m and 512m, SVD against Newton-Schulz (one parameter of each shape, times
   how many there are: the outer optimizer takes one at a time)
3. 178m, W = 8, as its recipe has it, compiled: tokens/s, model FLOP utilisation, and end to end SVD against fast. Steps
   are measured in rounds of few, what a round has beside them is added once: a round of H = 30.
4. 512m, states in host memory, for as many workers as fit there (at most 128), one step each: device memory as
   `isoloco plan` predicts it and as it was, tokens/s

The results are written after each part. Without a GPU only --toy runs, on the CPU: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS, Bar, machine
from isoloco import model as models
from isoloco.config import (
    BudgetConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    TransformConfig,
)
from isoloco.data.feed import reader, vocabulary
from isoloco.loss import loss_function
from isoloco.outer import IsoLoCo
from isoloco.outline import Prepared, prepare_run
from isoloco.plan import peak_flops
from isoloco.shelf import make_shelf
from isoloco.simulate import build_round

LIMIT_S = 480
SYNC_EVERY = 30


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large each part is."""

    outer: tuple[str, ...] = ("178m", "512m")
    speed: str = "178m"
    workers: int = 8
    batch: int = 32  # sequences a worker and step, and how many at a time: those of the recipe
    micro: int = 8
    seq_len: int = 2048
    steps: int = 5
    compile: bool = True
    memory: str = "512m"
    most_workers: int = 128
    vocabulary: int = 32000


TOY = Size(outer=("tiny",), speed="tiny", workers=2, batch=2, micro=1, seq_len=32, steps=2, compile=False,
           memory="tiny", most_workers=2, vocabulary=512)  # fmt: skip


class Watch:
    """Wall seconds of parts; the device has finished what it was given at each mark."""

    def __init__(self, device: str) -> None:
        self.device, self.parts = device, defaultdict[str, float](float)
        self.since = self._now()

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self, part: str) -> None:
        now = self._now()
        self.parts[part] += now - self.since
        self.since = now


def prepare(place: Path, size: Size, preset: str, device: str, **options: Any) -> Prepared:
    """A run over random tokens, resolved."""
    data = place / f"data-{preset}"
    if not data.exists():
        data.mkdir()
        tokens = np.random.default_rng(0).integers(0, size.vocabulary, 2**22, dtype=np.uint16)
        np.save(data / "train_000000.npy", tokens)
        np.save(data / "valid_000000.npy", tokens[: 4 * size.seq_len])
    return prepare_run(
        RunConfig(
            method="isoloco_fast",
            sync_every=SYNC_EVERY,
            budget=BudgetConfig(steps=10 * SYNC_EVERY),
            data=DataConfig(path=str(data), epochs=10**6),
            **options,
        )
    )


def model_shapes(preset: str, place: Path, size: Size, device: str) -> Counter[tuple[int, ...]]:
    prepared = prepare(
        place, size, preset, device, workers=1, global_batch_size=1,
        model=ModelConfig(preset=preset, seq_len=size.seq_len), compute=ComputeConfig(device=device),
    )  # fmt: skip
    meta = models.meta_model(prepared.config, size.vocabulary)
    return Counter(tuple(p.shape) for p in meta.parameters() if p.ndim == 2)


def outer_step(size: Size, place: Path, device: str) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Seconds of a whole outer step over the matrices, SVD against Newton-Schulz in float32 and bfloat16."""
    rows, bars = [], []
    for preset in size.outer:
        shapes = model_shapes(preset, place, size, device)
        seconds = {}
        for method in ("svd", "newton_schulz", "newton_schulz_bf16"):
            seconds[method] = sum(count * _one_matrix(shape, method, device) for shape, count in shapes.items())
            rows.append({"model": preset, "polar": method, "outer_s": seconds[method]})
        fast = min(("newton_schulz", "newton_schulz_bf16"), key=lambda method: seconds[method])
        times = seconds["svd"] / seconds[fast]
        passed = times >= 100 if device == "cuda" else None
        bars.append(
            Bar(what=f"{preset}: fast outer step 100 times faster than SVD", measured=f"{times:.1f}", passed=passed)
        )
    return rows, bars


def _one_matrix(shape: tuple[int, ...], method: str, device: str) -> float:
    p = torch.zeros(shape, device=device)
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = IsoLoCo([p], lr=1.8, momentum=0.8, polar=method)
    best = float("inf")
    for _ in range(2 if method == "svd" else 4):  # the first ones load libraries and fill caches
        watch = Watch(device)
        optimizer.step()
        watch.mark("step")
        best = min(best, watch.parts["step"])
    return best


def throughput(size: Size, place: Path, device: str) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Tokens per second of rounds with the fast outer step and with SVD, on one model and one state."""
    fast = prepare(
        place, size, size.speed, device, workers=size.workers, global_batch_size=size.workers * size.batch,
        micro_batch_size=size.micro, model=ModelConfig(preset=size.speed, seq_len=size.seq_len),
        compute=ComputeConfig(device=device, compile=size.compile),
    )  # fmt: skip
    svd = replace(fast.config, method="isoloco", transform=TransformConfig(name="iso_c", options={"polar": "svd"}),
                  outer=OuterConfig(lr=1.8, momentum=0.8, nesterov=True))  # fmt: skip
    model, state = models.build(fast.config, vocab_size=vocabulary(fast.data), device=device), None
    loss, read, rows = loss_function(fast.config), reader(fast.config, fast.data), []
    for name, config, warm_steps in (("fast", fast.config, 2), ("svd", svd, 0)):
        watch = Watch(device)

        def read_marked(worker: int, step: int, watch: Watch = watch) -> list[Tensor]:
            watch.mark("beside")
            return read(worker, step)

        def observe(phase: str, watch: Watch = watch, **info: Any) -> None:
            if phase == "inner":
                watch.mark("step")

        training, state = build_round(
            model, loss, read_marked, config=config, total_steps=fast.plan.steps, observe=observe, state=state,
            weight_fn=lambda rows_BT: float(rows_BT.numel() - len(rows_BT)),
        )  # fmt: skip
        for steps in filter(None, (warm_steps, size.steps)):
            watch.parts.clear()
            watch.mark("before")
            training.run(state, steps=steps)
            watch.mark("beside")
        step_s, beside_s = watch.parts["step"] / (size.workers * size.steps), watch.parts["beside"]
        round_s = size.workers * SYNC_EVERY * step_s + beside_s
        tokens = size.workers * SYNC_EVERY * size.batch * size.seq_len
        rows.append({
            "model": size.speed, "outer_step": name, "tokens/s": tokens / round_s, "step_s": step_s,
            "mfu": None, "beside_s": beside_s, "share_beside": beside_s / round_s,
        })  # fmt: skip
    peak = (peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None) or matmul_peak(device)
    for row in rows:
        row["mfu"] = row["tokens/s"] * models.flops_per_token(fast.config, size.vocabulary) / peak
    on_gpu = device == "cuda"
    times = rows[0]["tokens/s"] / rows[1]["tokens/s"]
    mfu = rows[0]["mfu"]
    return rows, [
        Bar(what=f"{size.speed}: 45 % model FLOP utilisation in bf16", measured=f"{mfu:.1%}",
            passed=mfu >= 0.45 if on_gpu and fast.config.compute.precision == "bf16-mixed" else None),
        Bar(what=f"{size.speed}: fast at least 1.1 times SVD end to end (the paper: about 1.15)",
            measured=f"{times:.3f}", passed=times >= 1.1 if on_gpu else None),
    ]  # fmt: skip


def matmul_peak(device: str) -> float:
    """Floating-point operations per second of a large bfloat16 product: for devices whose data sheet is not known."""
    n = 8192 if device == "cuda" else 256
    a_NN = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(5):
        watch = Watch(device)
        torch.matmul(a_NN, a_NN)
        watch.mark("product")
        best = min(best, watch.parts["product"])
    return 2 * n**3 / best


def memory(size: Size, place: Path, device: str) -> tuple[list[dict[str, Any]], list[Bar]]:
    """A round of one step of short rows, for the most workers whose states fit into host memory."""
    short = replace(size, seq_len=min(size.seq_len, 128))
    meta = Counter(model_shapes(size.memory, place, size, device))
    state_bytes = 8 * sum(count * shape[0] * shape[1] for shape, count in meta.items())
    workers = max(1, min(size.most_workers, int(0.7 * available_bytes() // state_bytes)))
    prepared = prepare(
        place, size, size.memory, device, workers=workers, global_batch_size=workers, micro_batch_size=1,
        model=ModelConfig(preset=size.memory, seq_len=short.seq_len),
        compute=ComputeConfig(device=device, worker_state="host"),
    )  # fmt: skip
    config = prepared.config
    # on the device lies what a run with states elsewhere holds: the plan of one on disk
    predicted = prepare_run(replace(config, compute=replace(config.compute, worker_state="disk"))).plan.memory_bytes
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = models.build(config, vocab_size=vocabulary(prepared.data), device=device)
    training, state = build_round(
        model, loss_function(config), reader(config, prepared.data), config=config, total_steps=prepared.plan.steps,
        shelf=make_shelf("host", folder=place / "states", device=device),
    )  # fmt: skip
    watch = Watch(device)
    training.run(state, steps=1)
    watch.mark("round")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    measured = torch.cuda.max_memory_allocated() if device == "cuda" else host
    row = {
        "model": size.memory, "workers": workers, "state_GB": workers * state_bytes / 1e9,
        "predicted_GB": predicted / 1e9, "measured_GB": measured / 1e9, "host_GB": host / 1e9,
        "tokens/s": workers * short.seq_len / watch.parts["round"],
    }  # fmt: skip
    off = predicted / measured - 1
    passed = abs(off) <= 0.1 if device == "cuda" else None
    return [row], [Bar(what="plan within 10 % of the device memory", measured=f"{off:+.1%}", passed=passed)]


def available_bytes() -> int:
    """Host memory that can be had, the container's limit included."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    info, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text("utf-8").splitlines())
        found = [int(lines["MemAvailable"].split()[0]) * 1024]
    if limit.exists() and (told := limit.read_text("utf-8").strip()).isdigit():
        found.append(int(told))
    return min(found)


def gpu_tests(size: Size, place: Path, device: str) -> tuple[list[dict[str, Any]], list[Bar]]:
    """The tests marked gpu; without a GPU they say that they were skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    told = (done.stdout.strip().splitlines() or ["nothing was said"])[-1]
    passed = done.returncode == 0 if device == "cuda" else None
    return [{"exit_code": done.returncode, "told": told}], [Bar(what="tests marked gpu", measured=told, passed=passed)]


PARTS: dict[str, Callable[[Size, Path, str], tuple[list[dict[str, Any]], list[Bar]]]] = {
    "outer_step": outer_step,
    "throughput": throughput,
    "memory": memory,
    "tests": gpu_tests,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny models, on whatever device there is")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in this order (%(default)s)")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    args = parser.parse_args(argv)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts takes {','.join(PARTS)}, got {','.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.toy:
        print("no CUDA device here: --toy shows on the CPU that it runs", file=sys.stderr)
        return 2
    size, out = TOY if args.toy else Size(), args.out or RESULTS
    facts = {**machine(), "gpu": torch.cuda.get_device_name() if device == "cuda" else None}
    started, result = time.perf_counter(), {"machine": facts, "parts": {}, "bars": []}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts.split(","):
            rows, found = PARTS[name](size, Path(folder), device)
            bars += found
            for line in [*rows, *found]:
                print(f"{name}: {line}", flush=True)
            result["parts"][name] = {"rows": rows, "seconds": time.perf_counter() - started}
            result["bars"] = [asdict(bar) for bar in bars]
            if args.out or not args.toy:
                out.mkdir(parents=True, exist_ok=True)
                (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    taken = time.perf_counter() - started
    print(f"{taken:.0f} s of {LIMIT_S}")
    return int(any(bar.passed is False for bar in bars) or (device == "cuda" and taken > LIMIT_S))


if __name__ == "__main__":
    raise SystemExit(main())
