"""`isoloco study`: parse, then call one function."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

DESCRIPTION = """Run the runs behind a table or figure, and make it. What is done is not done again: stop and
start it as you like, by several processes at once, on several machines with one file system.

run      run what is left, then report            status   what is done, runs, failed, and what to do
rows     write one row for each run that is done  report   tables, pictures and a page, from the rows"""
EXAMPLES = (
    "run quickstart --jobs 2",
    "run table2 --scale 178m --jobs 8 --devices-per-run 1",
    "status table2 --scale 178m",
    "report quickstart --out reports/quickstart",
    "report mini_table1 --csv docs/results/mini_table1.csv --format latex",
)


def study_command(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; ``parser`` has its name and description."""
    add = parser.add_argument
    add("action", choices=["run", "status", "rows", "report"], help="what to do")
    add("study", help="name of a packaged study, or a YAML file")
    add("--scale", help="one of the study's scales, such as 178m or mini")
    add("--seeds", type=_seeds, metavar="A,B,...", help="instead of those of the study")
    add("--root", default="studies", help="directory of the studies' runs (%(default)s)")
    add("--csv", help="file of the rows (ROOT/STUDY/rows.csv)")
    run = parser.add_argument_group("run")
    told = "runs at a time; they divide the CPU threads (1, or what the cores hold where a recipe says its threads)"
    run.add_argument("--jobs", type=_whole, help=told)
    run.add_argument("--devices-per-run", type=_whole, default=0, metavar="N", help="GPUs of its own for each run")
    run.add_argument("--retry", action="store_true", help="try again what has failed twice")
    report = parser.add_argument_group("report")
    report.add_argument("--format", choices=["markdown", "csv", "latex", "html"], default="markdown")
    report.add_argument("--out", metavar="DIR", help="write tables, pictures and a page there")
    report.add_argument("--bandwidth", default="100Mbit", help="of the link for estimated times (%(default)s)")
    args = parser.parse_args(argv)
    from .study_board import Board
    from .study_file import load

    study = load(args.study, args.scale)
    board = Board(replace(study, seeds=args.seeds) if args.seeds else study, args.root)
    rows = Path(args.csv) if args.csv else board.root / "rows.csv"
    words = [args.study, *(["--scale", args.scale] if args.scale else [])]
    words += [*(["--root", args.root] if args.root != "studies" else []), *(["--csv", args.csv] if args.csv else [])]
    command = shlex.join(["isoloco", "study", "run", *words])
    if args.action == "run":
        return _run(board, args, rows, command)
    if args.action == "rows":
        print(f"wrote {board.write_rows(rows)}")
        return 0
    if args.action == "status":
        from .study_view import status

        print("\n".join(status(board, command)))
        return 0
    if not rows.is_file():
        raise ValueError(f"no rows at {rows}: {command} makes them, or name a file with --csv")
    return _report(board, args, rows, command)


def _run(board: Any, args: argparse.Namespace, rows: Path, command: str) -> int:
    from .study import run_study
    from .study_view import headline, panel, standings

    if args.retry:
        print(f"{board.forgive()} failed attempts are put aside")
    signal.signal(signal.SIGTERM, _stop)
    jobs = args.jobs or _fitting(board, args.devices_per_run)
    options: dict[str, Any] = {"jobs": jobs, "devices_per_run": args.devices_per_run, "rows": rows}
    if sys.stdout.isatty():
        from rich.live import Live

        said: list[str] = []
        with Live(panel(board, said), auto_refresh=False) as live:
            done = run_study(
                board, say=said.append, watch=lambda: live.update(panel(board, said), refresh=True), **options
            )
    else:
        done = run_study(board, say=lambda line: print(line, flush=True), **options)
    print(headline(standings(board)))
    if not done:
        return 1
    from .report import RENDER, read_rows, tables_of
    from .report_html import write_report

    found = read_rows(board.write_rows(rows))
    write_report(board, found, board.root / "report", bandwidth=args.bandwidth, command=command)
    print("", *map(RENDER["markdown"], tables_of(board.study, found)), "", sep="\n")
    print(f"tables, pictures and a page with both: {board.root / 'report' / 'index.html'}")
    return 0


def _fitting(board: Any, devices_per_run: int) -> int:
    """Runs that fit the cores, 8 at most (they may share a GPU); one where each takes all cores, or GPUs."""
    threads = [board.study.config(cell).compute.threads for cell in board.study.cells]
    return 1 if devices_per_run or not all(threads) else min(8, max(1, (os.cpu_count() or 1) // max(threads)))


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt("its runs have saved themselves; the same command goes on from there")


def _report(board: Any, args: argparse.Namespace, rows: Path, command: str) -> int:
    from .report import RENDER, read_rows, tables_of

    found = read_rows(rows)
    if args.out is None and args.format != "html":
        print("\n\n".join(map(RENDER[args.format], tables_of(board.study, found))))
        return 0
    from .report_html import page, write_report

    if args.out is None:
        print(page(board, found, bandwidth=args.bandwidth, command=command))
    else:
        for path in write_report(board, found, args.out, bandwidth=args.bandwidth, command=command):
            print(f"wrote {path}")
    return 0


def _whole(text: str) -> int:
    from .cli import _whole as whole

    return whole(text)


def _seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"takes whole numbers such as 42,43,44, got {text!r}")
    return tuple(int(part) for part in parts)
