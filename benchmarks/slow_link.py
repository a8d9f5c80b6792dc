"""Training over a slow link: tokens per second of DP, DiLoCo and IsoLoCo, beside what they could be and what plan says.

    python -m benchmarks.slow_link [--toy] [--rates 20mbit,100mbit] [--out DIR]

Two workers in two network namespaces, joined by links whose rate a token bucket holds (both ways): a 21 M parameter
model, 8 x 128 tokens per worker and step, H = 30, one thread each. Every run trains through the command; DP takes three
steps, the others one round. With c the seconds that a step computes and m those in which DP talks, a round of H steps
could take H c + m; int8 talks m times its share of the bytes. `of ideal` is that over what the round took. c is each
run's own, since on a machine that others use it changes from run to run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Bar, report
from benchmarks.network import INSIDE, Network, enter, network

RATES = ("20mbit", "100mbit")
H, DP_STEPS, BATCH, SEQ_LEN = 30, 3, 8, 128
RUNS = (("dp", "float32"), ("diloco", "float32"), ("isoloco", "float32"), ("isoloco", "int8"))


def options(method: str, wire: str, *, toy: bool) -> dict[str, Any]:
    steps = DP_STEPS if method == "dp" else H
    found = {
        "method": method, "workers": 2, "global_batch_size": 2 * BATCH, "micro_batch_size": BATCH, "sync_every": H,
        "model.preset": "tiny" if toy else "21m", "model.seq_len": SEQ_LEN, "budget.steps": steps,
        "eval.tokens": 16 * SEQ_LEN, "eval.every_rounds": 0, "checkpoint.every_rounds": 0, "log.every_steps": 1,
        "log.spectra_every_rounds": 0, "compute.threads": 1, "comm.timeout_s": 600,
    }  # fmt: skip
    return found | ({"comm.wire": wire} if wire != "float32" else {})


def train(net: Network, method: str, wire: str, folder: Path, *, toy: bool, port: int) -> dict[str, float]:
    """Seconds of a step or round of one run: what it computed, what it talked, in all; and bytes sent."""
    from isoloco.metrics import read_metrics

    run = folder / f"{method}-{wire}-{port}"
    argv = [sys.executable, "-m", "isoloco", "train", "quickstart", f"--out_dir={run}"]
    argv += [f"--{key}={value}" for key, value in options(method, wire, toy=toy).items()]
    with (folder / "log").open("a") as log:
        children = [net.start(i, argv, log, port=port) for i in range(2)]
        if any(child.wait() for child in children):
            raise OSError(f"a run failed:\n{(folder / 'log').read_text()[-2000:]}")
    records = read_metrics(run)
    rounds = [r for r in records if r["kind"] == "round"]
    seconds = sum(r["inner_s"] + r.get("reduce_s", 0.0) + r.get("outer_s", 0.0) for r in rounds)
    talked, steps = sum(r["comm_s"] for r in rounds), rounds[-1]["step"]
    done = [r["at_s"] for r in records if r["kind"] == "inner" and r["worker"] == 0]
    # a step's seconds from one to the next: the first pays for what torch sets up
    step_s = (done[-1] - done[0]) / (len(done) - 1)
    compute_s = step_s - talked / steps if method == "dp" else step_s
    return {
        "compute_s": compute_s, "talk_s": talked / (steps if method == "dp" else 1), "sent": rounds[0]["sent_bytes"],
        "seconds": step_s if method == "dp" else seconds - (seconds_of_first(done, rounds, step_s)),
        "steps": steps, "parameters": json.loads((run / "run.json").read_text())["parameters"],
    }  # fmt: skip


def seconds_of_first(done: list[float], rounds: list[dict[str, Any]], step_s: float) -> float:
    """What the first step of a run took over the others."""
    return max(0.0, rounds[0]["inner_s"] - (done[-1] - done[0]) - step_s)


def planned(method: str, wire: str, rate: str, found: dict[str, float], *, toy: bool) -> float:
    """Tokens per second that `isoloco plan` tells for that link and that computing speed."""
    from isoloco.links import costs, link_flags
    from isoloco.outline import outline_run
    from isoloco.recipe import build_config

    tokens = 2 * BATCH * SEQ_LEN
    _, link = link_flags(["--bandwidth", rate, "--tokens-per-second", f"{tokens / found['compute_s']:.6g}"])
    assert link is not None
    config, _ = build_config("quickstart", options("diloco" if method == "dp" else method, wire, toy=toy))
    config, plan, _ = outline_run(config)
    cost = next(c for c in costs(config, plan, link) if c.name == ("dp" if method == "dp" else f"{method}, {wire}"))
    return config.sync_every * tokens / (cost.compute_s + cost.talk_s)


def run(rates: Sequence[str], *, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    rows: list[dict[str, Any]] = []
    tokens, port = 2 * BATCH * SEQ_LEN, 29600
    with tempfile.TemporaryDirectory() as place:
        for rate in rates:
            dp: dict[str, float] = {}
            sent = 0.0
            for method, wire in RUNS:
                with network(2, rate=rate) as net:
                    port += 1
                    found = train(net, method, wire, Path(place), toy=toy, port=port)
                c, steps = found["compute_s"], 1 if method == "dp" else H
                if method == "dp":
                    dp = found
                if wire == "float32" and method != "dp":
                    sent = found["sent"]
                m = dp["talk_s"] * (found["sent"] / sent if wire == "int8" else 1.0)
                ideal = c + m if method == "dp" else c + m / H
                measured = found["seconds"] / steps
                plan = planned(method, wire, rate, found, toy=toy)
                rows.append({
                    "rate": rate, "method": method, "wire": wire, "compute_s": c, "talk_s": found["talk_s"],
                    "MB_sent": found["sent"] / 1e6, "tokens/s": tokens / measured,
                    "times DP": (c + dp["talk_s"]) / measured, "of ideal": ideal / measured,
                    "plan/measured": plan / (tokens / measured),
                })  # fmt: skip
                print(rows[-1], file=sys.stderr, flush=True)
    rounds = [row for row in rows if row["method"] != "dp"]
    least = min(row["of ideal"] for row in rounds)
    off = max(abs(row["plan/measured"] - 1) for row in rows)
    return rows, [
        Bar(what="at least 0.85 of (c + m) / (c + m / H)", measured=f"{least:.3f}", passed=least >= 0.85),
        Bar(what="isoloco plan within 20 % of each", measured=f"{off:.1%}", passed=off <= 0.20),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a 1.3 M parameter model")
    parser.add_argument("--rates", default=",".join(RATES), help="as tc spells them (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (%(default)s)")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    code = enter("benchmarks.slow_link", list(sys.argv[1:] if argv is None else argv))
    if code is not None:
        return code
    rows, bars = run(args.rates.split(","), toy=args.toy)
    return report("slow_link", rows, bars, out=args.out)


if __name__ == "__main__":
    raise SystemExit(main())
