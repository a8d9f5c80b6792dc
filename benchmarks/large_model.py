"""A training of the 512m preset, from start to evaluated model, in the memory of one machine: states wait on disk.

    python -m benchmarks.large_model [--workers 8] [--rounds 1] [--place DIR] [--toy] [--out DIR]

One process trains W workers for a round of two steps, a row of 32 tokens a worker and step (packaged corpus), with the
exact outer step, evaluates, and leaves the model. Peak resident bytes are those of the process (ru_maxrss, resident
mappings counted), disk bytes those of the states at their most (a new file is written before the old one goes). It
takes 4.1 GB a worker in DIR, and minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Bar, report

LIMIT_BYTES = 24 * 2**30
SEQ_LEN, SYNC_EVERY = 32, 2


def folder_bytes(folder: Path) -> int:
    """What lies there; a file under several names once."""
    found: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:  # replaced since it was listed
            continue
        found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def run(place: Path, workers: int, rounds: int, *, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    run_dir = place / "run"
    options = {
        "method": "isoloco", "model.preset": "tiny" if toy else "512m", "model.seq_len": SEQ_LEN, "workers": workers,
        "global_batch_size": workers, "micro_batch_size": 1, "sync_every": SYNC_EVERY,
        "budget.steps": rounds * SYNC_EVERY, "compute.worker_state": "disk", "compute.threads": 1,
        "eval.tokens": 1024, "eval.every_rounds": 0,
        "checkpoint.every_rounds": 0, "checkpoint.best": False, "log.spectra_every_rounds": 0, "out_dir": str(run_dir),
    }  # fmt: skip
    argv = [sys.executable, "-m", "isoloco", "train", "quickstart", *(f"--{k}={v}" for k, v in options.items())]
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05 if toy else 2):
            most = max(most, folder_bytes(place))

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    try:
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    finally:
        over.set()
        watcher.join()
    if status:
        raise OSError(f"the run with {workers} workers failed")
    wall_s = time.perf_counter() - started
    manifest = json.loads((run_dir / "run.json").read_text("utf-8"))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    evaluated = [record for record in records if record.get("kind") == "eval"][-1]
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    row = {
        "model": options["model.preset"], "parameters": manifest["parameters"], "workers": workers,
        "rounds": rounds, "peak_GB": peak / 1e9, "bytes/parameter": peak / manifest["parameters"],
        "disk_GB": most / 1e9, "wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime,
        "valid_loss": evaluated["loss"],
    }  # fmt: skip
    left = (run_dir / "model" / "model.safetensors").is_file()
    return [row], [
        Bar(what="within 24 GiB", measured=f"{peak / 2**30:.1f} GiB", passed=peak <= LIMIT_BYTES),
        Bar(what="leaves an evaluated model", measured=f"loss {evaluated['loss']:.3f}", passed=left),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="how many (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of two steps; the second reads states (%(default)s)")
    parser.add_argument("--place", type=Path, help="where the run lies while it lasts; a temporary directory")
    parser.add_argument("--toy", action="store_true", help="a 1.3 M parameter model, two workers")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    args = parser.parse_args(argv)
    place = Path(tempfile.mkdtemp(dir=args.place))
    try:
        rows, bars = run(place, *((2, 2) if args.toy else (args.workers, args.rounds)), toy=args.toy)
    finally:
        shutil.rmtree(place)
    return report("large_model", rows, bars, out=args.out or (None if args.toy else RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
