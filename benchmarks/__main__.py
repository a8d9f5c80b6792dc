"""The benchmarks that need one machine and minutes, one after the other; one table, one JSON.

    python -m benchmarks [--toy] [--only polar,memory] [--out DIR]

Each is a process of its own with a time limit, and all end within 20 minutes. Others of this directory run by
themselves: options, large_model (a 512m model: disk and memory), gpu (needs one), slow_link (Linux, network namespaces,
an hour), merge_memory, owner_step, checkpoint_bytes, endurance, kill_matrix, elastic_kills.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import network
from benchmarks.common import RESULTS, machine

ALL_S = 1200.0
LIMITS_S = {"polar": 300.0, "outer_step": 300.0, "memory": 300.0, "throughput": 450.0, "tokenize": 240.0,
            "open_data": 60.0, "wire_bytes": 150.0}  # fmt: skip
VERDICTS = {True: "pass", False: "FAIL", None: "not applicable"}


def run_one(name: str, out: Path, *, toy: bool, limit_s: float) -> dict[str, Any]:
    """One benchmark: its bars, seconds, and how it ended where it left no bars."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out), *(["--toy"] if toy else [])]
    started = time.perf_counter()
    # a session of its own: at its limit the processes that it started end with it
    child = subprocess.Popen(command, cwd=Path(__file__).parents[1], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        child.wait(limit_s)
        ended = f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        ended = f"stopped at its limit of {limit_s:.0f} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    result = out / f"{name}.json"
    done = child.returncode in (0, 1) and result.is_file()
    found: dict[str, Any] = json.loads(result.read_text("utf-8")) if done else {"bars": [], "rows": []}
    return {"seconds": time.perf_counter() - started, "ended": ended, "measured": done, **found}


def table(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """A line for each bar: benchmark, bar, figure, verdict."""
    lines = [("benchmark", "bar", "figure", "")]
    for name, each in found.items():
        lines += [(name, bar["what"], bar["measured"], VERDICTS[bar["passed"]]) for bar in each["bars"]]
        if not each["measured"]:
            lines.append((name, "runs to its end", each["ended"], "FAIL"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="show that they run; the numbers mean nothing")
    parser.add_argument("--only", default=",".join(LIMITS_S), help="which ones (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"directory of the results (default: {RESULTS.name}; toy: none)")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"--only takes {','.join(LIMITS_S)}, got {','.join(unknown)}")
    found: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or (Path(folder) if args.toy else RESULTS)
        for name in names:
            if name == "wire_bytes" and not network.available():
                print("wire_bytes: not here, it needs network namespaces (Linux, for ordinary users)", file=sys.stderr)
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as fresh:  # an earlier result must not pass for this one
                left_s = started + ALL_S - time.perf_counter()
                found[name] = run_one(name, Path(fresh), toy=args.toy, limit_s=max(0.0, min(LIMITS_S[name], left_s)))
                out.mkdir(parents=True, exist_ok=True)
                for path in Path(fresh).iterdir():
                    (out / path.name).write_bytes(path.read_bytes())
        taken = time.perf_counter() - started
        result = {"machine": machine(), "seconds": taken, "benchmarks": found}
        (out / "benchmarks.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("  ".join(f"{key} {value}" for key, value in machine().items()), end="\n\n")
    lines = table(found)
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"\n{taken:.0f} s")
    return int(any(verdict == "FAIL" for *_, verdict in lines[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
