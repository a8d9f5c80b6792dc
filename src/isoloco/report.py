"""Tables of studies, from their rows alone."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

from .study_file import Study


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows that `isoloco study rows` wrote."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(study: Study, rows: list[dict[str, str]]) -> str:
    """Markdown: a row for each cell and point of its grid: mean, spread and standard deviation over the seeds.

    The best mean is bold; an optimum at the edge of its ladder is marked with a star.
    """
    entries = []
    for cell in study.cells:
        tuned = [axis.key for axis in cell.tune]
        shown = [axis.key for axis in cell.grid]
        reports: dict[tuple[Any, ...], list[float]] = {}
        chosen: dict[str, Any] = {}
        for row in rows:
            if row["cell"] == cell.name and row["kind"] == "report":
                options = json.loads(row["options"])
                chosen = {key: options[key] for key in tuned}
                reports.setdefault(tuple(options[key] for key in shown), []).append(float(row[study.metric]))
        trials = sum(row["cell"] == cell.name and row["kind"] == "trial" for row in rows)
        star = "*" if any(row["cell"] == cell.name and row["optimum"] == "edge" for row in rows) else ""
        for point, losses in reports.items():
            settings = {**chosen, **dict(zip(shown, point, strict=True))}
            told = ", ".join(f"{key} {value:g}" for key, value in settings.items()) or "preset"
            entries.append((cell.name, told + star, trials, losses))
    best = min((statistics.mean(losses) for *_, losses in entries), default=0.0)
    lines = ["| | settings | trials | loss (mean) | spread | standard deviation | seeds |", "|---" * 7 + "|"]
    for name, told, trials, losses in entries:
        mean = statistics.mean(losses)
        shown_mean = f"**{mean:.4f}**" if mean == best else f"{mean:.4f}"
        deviation = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-"
        spread = f"{max(losses) - min(losses):.4f}" if len(losses) > 1 else "-"
        lines.append(f"| `{name}` | {told} | {trials or '-'} | {shown_mean} | {spread} | {deviation} | {len(losses)} |")
    return "\n".join(lines)
