"""Opening 10 G tokens, 78 M rows of 128, and reading a batch from all over them: milliseconds and memory.

    python -m benchmarks.open_data [--toy] [--out DIR]

75 shards of 2^27 tokens, as `isoloco prepare` cuts them, sparse files: 20 GB to a reader that take no place on the
disk. Opening maps every shard; the order of rows is asked for a batch of 256. CPU time is the median of five, in one
process; memory is how far opening and asking for the order raise what the process holds (Linux; elsewhere its peak).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, Bar, cpu_seconds, report
from isoloco.data.order import Order
from isoloco.data.shards import open_data

SHARD_TOKENS, SEQ_LEN, BATCH = 2**27, 128, 256


def held_bytes() -> int:
    """Resident bytes of this process; where nothing tells them, the most there have been."""
    told = Path("/proc/self/statm")
    if told.exists():
        return int(told.read_text("utf-8").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    shards, shard_tokens = (3, 2**16) if toy else (75, SHARD_TOKENS)
    opened, asked, read = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for i in range(shards):
            path = place / f"train_{i:06d}.npy"
            np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(shard_tokens,))
        open_data(place).split("train").read(np.array([0]), SEQ_LEN)  # what is imported and made once
        before = held_bytes()
        for _ in range(5):
            seconds, data = cpu_seconds(lambda: open_data(place))
            opened.append(seconds)
            split = data.split("train")
            total = split.rows(SEQ_LEN)
            seconds, rows = cpu_seconds(lambda total=total: Order(total, seed=42).take(0, BATCH))
            asked.append(seconds)
        more = held_bytes() - before
        for _ in range(5):
            seconds, _ = cpu_seconds(lambda split=split, rows=rows: split.read(rows, SEQ_LEN))
            read.append(seconds)
    open_s, order_s, read_s = (statistics.median(each) for each in (opened, asked, read))
    row = {
        "tokens": split.tokens, "rows": total, "shards": shards, "open_ms": 1e3 * open_s, "order_ms": 1e3 * order_s,
        "read_ms": 1e3 * read_s, "memory_MB": more / 1e6,
    }  # fmt: skip
    return [row], [
        Bar(what="10 G tokens open in less than 100 ms", measured=f"{1e3 * open_s:.1f} ms",
            passed=None if toy else open_s < 0.1),
        Bar(what="and take less than 5 MB", measured=f"{more / 1e6:.2f} MB", passed=None if toy else more < 5e6),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="three small shards: its numbers mean nothing")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    args = parser.parse_args(argv)
    rows, bars = run(toy=args.toy)
    return report("open_data", rows, bars, out=args.out or (None if args.toy else RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
