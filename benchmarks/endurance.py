"""What a long run takes: memory, open files and disk after 200 and after 2,000 rounds; bytes of checkpoints.

    python -m benchmarks.endurance

Two thousand rounds of a tiny run, its idle workers' states on disk, a checkpoint every few rounds: nothing may grow but
metrics.jsonl, which is kept. Then a run with 8 and one with 32 workers: what their checkpoints take on the disk, a file
with several names counted once, against what has to be kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoloco.config import from_flat
from isoloco.train import train

from .common import RESULTS, Bar, report

VOCAB, SEQ_LEN = 64, 16


def prepare(place: Path, *, hidden: int) -> dict[str, Any]:
    """Data and a network in a new directory, and the options of a tiny run of them."""
    data = place / "data"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(0)
    for split, rows in (("train", 512), ("valid", 16), ("test", 16)):
        np.save(data / f"{split}_000000.npy", tokens.integers(VOCAB, size=rows * SEQ_LEN).astype(np.uint16))
    network = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 2 * hidden, "vocab_size": None, "max_position_embeddings": SEQ_LEN,
    }  # fmt: skip
    (place / "network.json").write_text(json.dumps(network), "utf-8")
    return {
        "out_dir": str(place / "run"), "model.config": str(place / "network.json"), "model.seq_len": SEQ_LEN,
        "data.path": str(data), "data.epochs": 1_000_000, "method": "isoloco", "micro_batch_size": 1,
        "eval.tokens": 16 * SEQ_LEN, "log.spectra_every_rounds": 100, "compute.threads": 1,
    }  # fmt: skip


def endure(place: Path, *, rounds: int, look_at: tuple[int, ...], workers: int = 4) -> list[dict[str, Any]]:
    """Train many short rounds; memory, open files and disk after some of them, while the training goes on."""
    options = prepare(place, hidden=32)
    options |= {
        "workers": workers, "sync_every": 2, "global_batch_size": workers, "budget.steps": 2 * rounds,
        "compute.worker_state": "disk", "checkpoint.every_rounds": 5, "eval.every_rounds": 20, "log.every_steps": 1,
    }  # fmt: skip
    run = Path(options["out_dir"])
    found: list[dict[str, Any]] = []

    def observe(phase: str, **info: Any) -> None:
        if phase == "checkpoint" and info["round"] in look_at:  # the one before is whole, this one is not begun
            gc.collect()
            found.append(
                {
                    "rounds": info["round"],
                    "memory_mib": memory_bytes() / 2**20,
                    "open_files": len(os.listdir("/proc/self/fd")),
                    "disk_bytes": disk_bytes(run) - (run / "metrics.jsonl").stat().st_size,
                    "files": sum(path.is_file() for path in run.rglob("*")),
                    "metrics_bytes": (run / "metrics.jsonl").stat().st_size,
                }
            )
            print(found[-1], file=sys.stderr, flush=True)

    train(from_flat(options), observe=observe)
    return found


def checkpoint_bytes(place: Path, *, workers: int, keep_last: int) -> dict[str, Any]:
    """What the checkpoints of a run take, and what they have to hold: states of AdamW, anchor and momentum."""
    options = prepare(place, hidden=64)
    options |= {
        "workers": workers, "sync_every": 1, "global_batch_size": workers, "budget.steps": keep_last + 1,
        "checkpoint.every_rounds": 1, "checkpoint.keep_last": keep_last, "eval.every_rounds": 0,
    }  # fmt: skip
    run = train(from_flat(options)).run_dir
    parameters = json.loads((run / "run.json").read_text("utf-8"))["parameters"]
    anchor = momentum = 4 * parameters
    needed = keep_last * (workers * 8 * parameters + anchor + momentum)
    taken = disk_bytes(run / "checkpoints")
    return {
        "workers": workers,
        "keep_last": keep_last,
        "parameters": parameters,
        "needed_bytes": needed,
        "taken_bytes": taken,
        "over_percent": 100 * (taken / needed - 1),
    }


def memory_bytes() -> int:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def disk_bytes(directory: Path) -> int:
    """Bytes of all files under a directory; one that has several names counts once."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=2000, help="of the long run, a multiple of 50 (%(default)s)")
    add("--out", type=Path, default=RESULTS, help="directory of endurance.json and checkpoint_bytes.json (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="endurance-") as place:
        early, late = args.rounds // 10, args.rounds
        rows = endure(Path(place) / "long", rounds=args.rounds + 5, look_at=(early, late // 2, late))
        sizes = [
            checkpoint_bytes(Path(place) / f"{workers}-{keep}", workers=workers, keep_last=keep)
            for workers in (8, 32)
            for keep in (1, 2)
        ]
    first, last = rows[0], rows[-1]
    grown_mib = last["memory_mib"] - first["memory_mib"]
    disk = last["disk_bytes"] / first["disk_bytes"] - 1
    bars = [
        Bar(
            what=f"memory grown from round {early} to {late}",
            measured=f"{grown_mib:.1f} MiB of {first['memory_mib']:.0f}",
            passed=grown_mib <= 0.02 * first["memory_mib"],
        ),
        Bar(
            what="open files grown",
            measured=str(last["open_files"] - first["open_files"]),
            passed=last["open_files"] <= first["open_files"],
        ),
        Bar(what="disk grown but for metrics.jsonl", measured=f"{100 * disk:.2f} %", passed=disk <= 0.001),
    ]
    code = report("endurance", rows, bars, out=args.out)
    print()
    worst = max(row["over_percent"] for row in sizes)
    bar = Bar(what="checkpoints over what has to be kept", measured=f"{worst:.2f} %", passed=worst <= 2)
    return max(code, report("checkpoint_bytes", sizes, [bar], out=args.out))


if __name__ == "__main__":
    sys.exit(main())
