"""Peak memory and speed of `isoloco merge`: three experts of a random 1 GB float32 model in several files.

    python -m benchmarks.merge_memory [--toy] [--rules mean,ties,...] [--dir DIR] [--out DIR]

Files are written to a temporary directory (5 GB with the output) and deleted. Every merge runs in a process of its own,
page cache warm; its peak is that process's largest resident set, mapped files included, and its time is process CPU
time (other processes on the machine hardly count) from reading the first header to renaming the output. The measure of
speed is a process that only reads the same four models into one small buffer and writes one model from it, as fast as
plain system calls do. Medians of several runs in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Bar, cpu_seconds, report

EXPERTS = 3
VOCAB, WIDTH, MLP, LAYERS = 32000, 1024, 2688, 16
RULES: dict[str, list[dict[str, Any]]] = {
    "mean": [{"reduce": "mean"}],
    "ties": [{"reduce": "ties"}],
    "dare": [{"reduce": "dare"}],
    "iso_c": [{"transform": "iso_c"}],
    "tsv": [{"reduce": "tsv"}],
    "iso_cts": [{"reduce": "iso_cts"}],
}
SLACK_BYTES = 600e6  # Python, torch, and what the bar allows beside tensors
RUNS = 3


def shapes(scale: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors, a ``scale``-th as wide."""
    width, mlp, vocab = WIDTH // scale, MLP // scale, VOCAB // scale
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    for i in range(LAYERS):
        attention = {f"model.layers.{i}.self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
        gates = {f"model.layers.{i}.mlp.{part}_proj.weight": (mlp, width) for part in ("gate", "up")}
        down = {f"model.layers.{i}.mlp.down_proj.weight": (width, mlp)}
        norms = {f"model.layers.{i}.{part}_layernorm.weight": (width,) for part in ("input", "post_attention")}
        found |= attention | gates | down | norms
    return found


def write_models(directory: Path, scale: int, *, files: int = 4) -> None:
    import torch
    from safetensors.torch import save_file

    names = list(shapes(scale))
    base: dict[str, torch.Tensor] = {}
    for model in ("base", *(f"expert{i}" for i in range(EXPERTS))):
        (directory / model).mkdir()
        (directory / model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
        for i in range(files):
            part = {}
            for name in names[i::files]:
                noise = torch.randn(shapes(scale)[name])
                part[name] = base.setdefault(name, noise) + (0 if model == "base" else 0.01) * noise
            save_file(part, directory / model / f"model-{i}.safetensors", metadata={"format": "pt"})
        weight_map = {name: f"model-{i}.safetensors" for i in range(files) for name in names[i::files]}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / model / "model.safetensors.index.json").write_text(json.dumps(index))


def merge(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One merge in this process."""
    import torch

    from isoloco.merging.files import merge_files
    from isoloco.merging.plan import make_plan
    from isoloco.merging.request import Request

    torch.set_num_threads(1)
    before = _peak_bytes()
    experts = [str(directory / f"expert{i}") for i in range(EXPERTS)]
    request = Request(base=str(directory / "base"), experts=experts, settings=settings, shard_bytes=2**28)
    start = time.perf_counter()
    seconds, plan = cpu_seconds(lambda: _run(request, directory / "out", make_plan, merge_files))
    wall = time.perf_counter() - start
    shutil.rmtree(directory / "out")
    return {"cpu_s": seconds, "wall_s": wall, "peak": _peak_bytes(), "before": before, "estimate": plan.peak_bytes}


def _run(request: Any, out: Path, make_plan: Any, merge_files: Any) -> Any:
    plan = make_plan(request)
    merge_files(plan, out)
    return plan


def copy(directory: Path) -> dict[str, Any]:
    """Read all models, write one, and nothing else."""
    files = [sorted((directory / model).glob("*.safetensors")) for model in ("base", "expert0", "expert1", "expert2")]
    buffer = memoryview(bytearray(2**23))

    def run() -> None:
        for path in (path for model in files for path in model):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        for path in files[0]:
            with (directory / path.name).open("wb", buffering=0) as file:
                left = path.stat().st_size
                while left:
                    left -= file.write(buffer[: min(left, len(buffer))])

    start = time.perf_counter()
    seconds, _ = cpu_seconds(run)
    wall = time.perf_counter() - start
    for path in files[0]:
        (directory / path.name).unlink()
    return {"cpu_s": seconds, "wall_s": wall, "peak": _peak_bytes(), "before": 0, "estimate": 0}


def _peak_bytes() -> int:
    """This program's own: what getrusage says begins with its parent's, whose memory it was forked from."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def in_process(directory: Path, what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.merge_memory", "--one", what, "--dir", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a model an eighth as wide: says nothing about the bars")
    parser.add_argument("--rules", default="mean,ties,dare,iso_c", help="%(default)s; of them: " + ", ".join(RULES))
    parser.add_argument("--dir", type=Path, default=None, help="where the models are written (a temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(copy(args.dir) if args.one == "copy" else merge(args.dir, RULES[args.one][0])))
        return 0
    scale = 8 if args.toy else 1
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="merge_memory-") as directory:
        return measure(Path(directory), scale, args.rules.split(","), args.out)


def measure(directory: Path, scale: int, rules: list[str], out: Path) -> int:
    write_models(directory, scale)
    count = sum(_product(shape) for shape in shapes(scale).values())
    largest = 4 * max(_product(shape) for shape in shapes(scale).values())
    in_process(directory, "copy")  # the page cache is warm from here on
    found: dict[str, list[dict[str, Any]]] = {what: [] for what in ("copy", *rules)}
    for run in range(RUNS):
        for what in found:
            if run == 0 or what in ("copy", "mean"):
                found[what].append(in_process(directory, what))
    median = {what: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
              for what, runs in found.items()}  # fmt: skip
    rows = [
        {
            "what": what,
            "cpu_s": one["cpu_s"],
            "wall_s": one["wall_s"],
            "peak_mb": one["peak"] / 1e6,
            "beside_imports_mb": (one["peak"] - one["before"]) / 1e6 if what != "copy" else None,
            "estimate_mb": one["estimate"] / 1e6 if what != "copy" else None,
        }
        for what, one in median.items()
    ]
    print(f"model of {4 * count / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, {EXPERTS} experts\n")
    bars = []
    if "mean" in median:
        allowed = (EXPERTS + 2) * largest + SLACK_BYTES
        speed = median["copy"]["cpu_s"] / median["mean"]["cpu_s"]
        peak = max(each["peak"] for each in found["mean"])
        bars = [
            Bar(what=f"peak of mean, at most {allowed / 1e6:.0f} MB", measured=f"{peak / 1e6:.0f} MB",
                passed=peak < allowed if scale == 1 else None),
            Bar(what="speed of mean over that of reading and writing, at least 0.5", measured=f"{speed:.2f}",
                passed=speed >= 0.5 if scale == 1 else None),
        ]  # fmt: skip
    return report("merge_memory", rows, bars, out=out)


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


if __name__ == "__main__":
    sys.exit(main())
