"""`isoloco compare`: any runs side by side."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from . import console
from .config import options
from .report import RENDER, Table
from .report_html import build_page
from .report_plots import Picture, loss_curve, tokens_picture
from .rundir import RunDir

DESCRIPTION = "Runs side by side: what differs in their options, their losses, and one picture of them."
EXAMPLES = ("runs/quickstart-1 runs/quickstart-2", "runs/quickstart-* --out compared")
HIDDEN = ("name", "out_dir", "compute.threads")  # differ between most runs and affect no result
FIGURES = (
    ("valid_loss_last", ".4f"), ("valid_loss_best", ".4f"), ("tokens", ",d"), ("tokens_per_s", ",.0f"),
    ("wire_bytes_per_worker", ",d"), ("wall_s", ",.0f"),
)  # fmt: skip


def compare_command(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; ``parser`` has its name and description."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--format", choices=list(RENDER), default="markdown", help="of the table (%(default)s)")
    parser.add_argument("--out", metavar="DIR", help="write the table, a picture and a page there")
    args = parser.parse_args(argv)
    names = _names([Path(run) for run in args.runs])
    table = table_of_runs(names)
    if args.out is None and args.format != "html":
        print(RENDER[args.format](table))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(args.out or folder)
        drawn = draw_runs(names, out)
        text = build_page("Runs compared", [], [table], drawn, [])
        if args.out is None:
            print(text)
            return 0
    for kind, suffix in (("markdown", "md"), ("csv", "csv"), ("latex", "tex")):
        (out / f"table.{suffix}").write_text(RENDER[kind](table) + "\n", "utf-8")
    (out / "index.html").write_text(text, "utf-8")
    print(f"wrote {out / 'index.html'}")
    return 0


def _names(paths: list[Path]) -> dict[str, Path]:
    """Directories by their names; by more of the path where these are the same."""
    short = [path.absolute().name for path in paths]
    return {name if short.count(name) == 1 else str(path): path for name, path in zip(short, paths, strict=True)}


def table_of_runs(names: dict[str, Path]) -> Table:
    """A row for each run: its method, the options in which they differ, and its figures; lowest last loss in bold.

    Errors: ValueError where a directory is no run.
    """
    runs = {name: RunDir.open(path) for name, path in names.items()}
    configs: dict[str, dict[str, Any]] = {name: _options(run) for name, run in runs.items()}
    first = next(iter(configs.values()))
    differing = [
        key
        for key in options()
        if key not in HIDDEN and any(each.get(key) != first.get(key) for each in configs.values())
    ]
    shown = ["method", *(key for key in differing if key != "method")]
    summaries = {name: run.manifest.get("summary") or {} for name, run in runs.items()}
    figures = [(key, form) for key, form in FIGURES if any(s.get(key) for s in summaries.values())]
    losses = [s["valid_loss_last"] for s in summaries.values() if s.get("valid_loss_last")]
    body, bold = [], set()
    for i, (name, run) in enumerate(runs.items()):
        summary = summaries[name]
        row = [name, run.manifest["state"], *(_shown(configs[name][key]) for key in shown)]
        row += ["-" if summary.get(key) is None else format(summary[key], form) for key, form in figures]
        body.append(row)
        if losses and summary.get("valid_loss_last") == min(losses):
            bold.add((i, 2 + len(shown)))
    return Table(["", "state", *shown, *(key for key, _ in figures)], body, frozenset(bold), "Options and figures")


def _options(run: RunDir) -> dict[str, Any]:
    """The options as the run has written them, of whatever version."""
    import yaml

    path = run.path / run.manifest.get("config", "config.yaml")
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{console.relative(path)} cannot be read: {' '.join(str(error).split())}") from None
    found: dict[str, Any] = {}
    for key in options():
        node: Any = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        found[key] = node
    return found


def draw_runs(names: dict[str, Path], out: Path) -> list[Picture]:
    """Loss against tokens of all runs that have begun."""
    out.mkdir(parents=True, exist_ok=True)
    found = {name: loss_curve(path) for name, path in names.items()}
    curves = {name: curve for name, (_, curve) in found.items() if curve[0]}
    kinds = {found[name][0] for name in curves}
    what = kinds.pop() if len(kinds) == 1 else "loss"
    return [tokens_picture(curves, out / "loss-tokens.png", what=what)] if curves else []


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else console.printable(str(value))
