"""Tables of studies, from their rows alone; as Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .climb import Axis
from .config import RunConfig, get
from .study_file import Cell, Study


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows that `isoloco study rows` wrote. ValueError where they are something else."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"cell", "kind", "seed", "options"} <= rows[0].keys():
        raise ValueError(f"{path} has no rows of a study; isoloco study rows writes them")
    return rows


@dataclass(frozen=True)
class Entry:
    """A cell at one point of its grid: what was chosen for it, and the losses of its seeds that are done."""

    cell: Cell
    settings: dict[str, Any]
    config: RunConfig
    trials: int
    edge: bool
    losses: list[float]
    runs: list[str]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses) if self.losses else math.inf

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def label(self) -> str:
        """The cell's name, with its point of the grid."""
        grid = [f"{axis.key} {_shown(self.settings[axis.key])}" for axis in self.cell.grid]
        return ", ".join([self.cell.name, *grid])


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; ``bold`` has places of the body. Names of the first column are code."""

    head: list[str]
    body: list[list[str]]
    bold: frozenset[tuple[int, int]]
    caption: str = ""


def entries(study: Study, rows: list[dict[str, str]]) -> list[Entry]:
    """What the rows say about each cell of a study, in its order."""
    found = []
    for cell in study.cells:
        own = [row for row in rows if row["cell"] == cell.name]
        points: dict[str, list[dict[str, str]]] = {}
        for row in own:
            if row["kind"] == "report":
                options = json.loads(row["options"])
                points.setdefault(_key(options, cell.grid), []).append(row)
        trials = sum(row["kind"] == "trial" for row in own)
        edge = any(row["optimum"] == "edge" for row in own)
        for reports in points.values():
            options = json.loads(reports[0]["options"])
            settings = {axis.key: options[axis.key] for axis in cell.tune + cell.grid}
            losses = [float(row[study.metric]) for row in reports if row[study.metric]]
            config, runs = study.config(cell, options), [row["run"] for row in reports]
            found.append(Entry(cell, settings, config, trials, edge, losses, runs))
    return found


def _key(options: dict[str, Any], grid: tuple[Axis, ...]) -> str:
    return json.dumps([options[axis.key] for axis in grid], sort_keys=True)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def table_of(study: Study, rows: list[dict[str, str]]) -> Table:
    """A row for each cell and point of its grid: mean, spread and standard deviation over the seeds.

    The best mean is bold; an optimum at the edge of its ladder is marked with a star. Where the study has a baseline,
    the difference to it; where the paper gives values, these, and the difference to them.
    """
    found = entries(study, rows)
    best = min((entry.mean for entry in found), default=math.inf)
    base = next((entry.mean for entry in found if entry.cell.name == study.baseline and entry.losses), None)
    paper = any(entry.cell.paper is not None for entry in found)
    head = ["", "settings", "trials", "loss (mean)", "spread", "standard deviation", "seeds"]
    head += [f"to {study.baseline}"] * bool(study.baseline) + ["paper", "to the paper"] * paper
    body, bold = [], set()
    for i, entry in enumerate(found):
        told = ", ".join(f"{key} {_shown(value)}" for key, value in entry.settings.items()) or "preset"
        spread = f"{max(entry.losses) - min(entry.losses):.4f}" if len(entry.losses) > 1 else "-"
        line = [
            entry.cell.name, told + "*" * entry.edge, str(entry.trials or "-"),
            f"{entry.mean:.4f}" if entry.losses else "failed", spread,
            "-" if entry.deviation is None else f"{entry.deviation:.4f}", str(len(entry.losses)),
        ]  # fmt: skip
        if study.baseline:
            line.append(_difference(entry, base))
        if paper:
            line += [_decimals(entry.cell.paper), _difference(entry, entry.cell.paper)]
        body.append(line)
        if entry.losses and entry.mean == best:
            bold.add((i, 3))
    return Table(head, body, frozenset(bold), study.title)


def _difference(entry: Entry, other: float | None) -> str:
    return f"{entry.mean - other:+.4f}" if entry.losses and other is not None else "-"


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def pivot_of(study: Study, rows: list[dict[str, str]]) -> Table | None:
    """The study's layout: mean and standard deviation by two options, the paper's value in brackets; None without."""
    if not study.layout:
        return None
    down, across = study.layout["rows"], study.layout["columns"]
    found: dict[tuple[Any, Any], Entry] = {}
    for entry in entries(study, rows):
        place = (get(entry.config, down), get(entry.config, across))
        if entry.losses and not entry.config.is_dp and (place not in found or entry.mean < found[place].mean):
            found[place] = entry
    lines = list(dict.fromkeys(place[0] for place in found))
    columns = sorted({place[1] for place in found})
    body, bold = [], set()
    for i, line in enumerate(lines):
        body.append([str(line)])
        for j, column in enumerate(columns):
            entry = found.get((line, column))
            body[-1].append("-" if entry is None else _cell_text(entry))
            if entry and entry.mean == min(e.mean for place, e in found.items() if place[1] == column):
                bold.add((i, j + 1))
    return Table(["", *(f"{across} {column}" for column in columns)], body, frozenset(bold), study.title)


def _cell_text(entry: Entry) -> str:
    deviation = "" if entry.deviation is None else f" ± {entry.deviation:.4f}"
    paper = "" if entry.cell.paper is None else f" ({entry.cell.paper:.3f})"
    return f"{entry.mean:.4f}{deviation}{paper}"


def tables_of(study: Study, rows: list[dict[str, str]]) -> list[Table]:
    """The study's layout, where it has one, and the table of all cells."""
    pivot = pivot_of(study, rows)
    return [*([pivot] if pivot else []), table_of(study, rows)]


def table(study: Study, rows: list[dict[str, str]]) -> str:
    """`table_of` as Markdown."""
    return markdown(table_of(study, rows))


def markdown(table: Table) -> str:
    lines = ["| " + " | ".join(table.head).strip() + " |", "|---" * len(table.head) + "|"]
    lines[0] = "|" + "|".join(f" {text} " if text else " " for text in table.head) + "|"
    for i, row in enumerate(table.body):
        texts = [f"`{row[0]}`", *(f"**{t}**" if (i, j) in table.bold else t for j, t in enumerate(row[1:], 1))]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def csv_text(table: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.head, *table.body])
    return file.getvalue().rstrip("\n")


def latex(table: Table) -> str:
    """A tabular that needs no package."""
    lines = ["\\begin{tabular}{l" + "r" * (len(table.head) - 1) + "}", "\\hline"]
    lines += [" & ".join(map(_escaped, table.head)) + " \\\\", "\\hline"]
    for i, row in enumerate(table.body):
        name, *rest = map(_escaped, row)
        texts = [f"\\texttt{{{name}}}"]
        texts += [f"\\textbf{{{t}}}" if (i, j) in table.bold else t for j, t in enumerate(rest, 1)]
        lines.append(" & ".join(texts) + " \\\\")
    return "\n".join([*lines, "\\hline", "\\end{tabular}"])


def _escaped(text: str) -> str:
    text = re.sub(r"([\\{}_&%$#~^])", lambda m: {"\\": "\\textbackslash{}"}.get(m[1], "\\" + m[1]), text)
    return re.sub(r"[+-]\d[\d.]*$", lambda m: f"${m[0]}$", text).replace("±", "$\\pm$")


def html_table(table: Table) -> str:
    words = [" class=words" * (text == "settings") for text in table.head]
    head = "".join(
        f"<th scope=col{kind}>{html.escape(text)}</th>" for kind, text in zip(words, table.head, strict=True)
    )
    body = ""
    for i, row in enumerate(table.body):
        texts = [html.escape(text) for text in row]
        cells = "".join(
            f"<td{words[j]}>{f'<b>{t}</b>' if (i, j) in table.bold else t}</td>" for j, t in enumerate(texts[1:], 1)
        )
        body += f"<tr><th scope=row><code>{texts[0]}</code></th>{cells}</tr>\n"
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


RENDER: dict[str, Callable[[Table], str]] = {
    "markdown": markdown,
    "csv": csv_text,
    "latex": latex,
    "html": html_table,
}
