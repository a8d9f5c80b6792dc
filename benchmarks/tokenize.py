"""Tokenizing text that is assembled here: isoloco's prepare against a pool that takes a document at a time.

    python -m benchmarks.tokenize [--megabytes 100] [--toy] [--out DIR]

The text is the embedded corpus over and over, its paragraphs shuffled each time; a byte-level BPE of 32000 entries is
trained once on the corpus and used by both. The pool (document_pool.py) is the usual script: worker processes encode
one document each and send token ids back, the parent appends them to one array on disk. prepare also hashes, splits,
checks and can resume. Each is a process of its own; its CPU time is that of its threads and children, start included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, Bar, report
from isoloco.data.shards import open_data
from isoloco.data.sources import Corpus
from isoloco.data.text import SEPARATOR
from isoloco.data.tokenizer import train_bpe

VOCABULARY, TOY_VOCABULARY = 32000, 500


def documents() -> list[str]:
    """Those of the embedded corpus, whole."""
    whole: list[str] = []
    parts: list[str] = []
    for piece in Corpus("sotu").read():
        parts.append(piece.text)
        if piece.last:
            whole.append("".join(parts))
            parts = []
    return whole


def assemble(path: Path, megabytes: float) -> int:
    """Write so much text, documents apart by lines of the separator; its bytes."""
    texts, shuffle, written = documents(), random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        for text in itertools.cycle(texts):
            paragraphs = text.split("\n")
            shuffle.shuffle(paragraphs)
            document = "\n".join(paragraphs).strip() + "\n"
            file.write(f"{document}{SEPARATOR}\n")
            written += len(document.encode())
            if written >= megabytes * 1e6:
                return written
    raise AssertionError("the corpus is empty")


# A process's ru_maxrss begins with that of the process it was forked from: this small one stands between.
LAUNCH = """
import json, os, sys, time
started = time.perf_counter()
child = os.posix_spawn(sys.executable, [sys.executable, "-m", *sys.argv[1:]], os.environ,
                       file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
_, status, used = os.wait4(child, 0)
taken = {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.perf_counter() - started, "peak": used.ru_maxrss}
print(json.dumps(taken))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def in_own_process(argv: Sequence[str]) -> dict[str, float]:
    """CPU seconds of a process, its threads and children, its wall seconds and peak resident bytes."""
    launch = [sys.executable, "-c", LAUNCH, *argv]
    done = subprocess.run(launch, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise OSError(f"python -m {' '.join(argv)} failed")
    used: dict[str, float] = json.loads(done.stdout)
    return {**used, "peak": used["peak"] * (1 if sys.platform == "darwin" else 1024)}


def run(megabytes: float, *, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text, tokenizer, data, flat = place / "text.txt", place / "tokenizer.json", place / "data", place / "flat.bin"
        size = assemble(text, megabytes)
        train_bpe(documents(), TOY_VOCABULARY if toy else VOCABULARY).backend.save(str(tokenizer))
        for program in ("prepare", "pool"):
            if program == "prepare":
                ours = ["--tokenizer", str(tokenizer), "--out", str(data), "--valid-tokens", "0", "--test-tokens", "0"]
                used = in_own_process(["isoloco", "prepare", str(text), *ours])
                tokens = open_data(data).tokens("train")
            else:
                theirs = [str(text), str(tokenizer), str(flat)]
                used = in_own_process(["benchmarks.document_pool", *theirs])
                tokens = flat.stat().st_size // 2
            rows.append({
                "program": program, "text_MB": size / 1e6, "tokens": tokens, "cpu_s": used["cpu_s"],
                "tokens/cpu_s": tokens / used["cpu_s"], "wall_s": used["wall_s"], "peak_MB": used["peak"] / 1e6,
            })  # fmt: skip
        stored = open_data(data).split("train").shards
        same = np.concatenate([shard.array for shard in stored]).tobytes() == flat.read_bytes()
    times = rows[0]["tokens/cpu_s"] / rows[1]["tokens/cpu_s"]
    peak = rows[0]["peak_MB"]
    return rows, [
        Bar(what="at least 1.3 times the document-at-a-time pool", measured=f"{times:.2f}",
            passed=None if toy else times >= 1.3),
        Bar(what="less than 600 MB", measured=f"{peak:.0f} MB", passed=peak < 600),
        Bar(what="the same tokens", measured=f"{rows[0]['tokens']} and {rows[1]['tokens']}", passed=same),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="of text (%(default)s)")
    parser.add_argument("--toy", action="store_true", help="1 MB and 500 entries")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    args = parser.parse_args(argv)
    rows, bars = run(1 if args.toy else args.megabytes, toy=args.toy)
    return report("tokenize", rows, bars, out=args.out or (None if args.toy else RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
