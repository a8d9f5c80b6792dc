"""A study on disk: which runs it wants, and what came out of those that are done. The run directory is the truth."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .climb import Axis, Point, best_point, climb, inside
from .study_file import Cell, Study

WHY = "why.txt"  # one line, in the directory of a run that failed or was interrupted


@dataclass(frozen=True)
class Run:
    """One run of a study: what is set over the recipe."""

    cell: str
    kind: str  # trial | report
    seed: int
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Hash of all that is set: the name of its directory."""
        return hashlib.sha256(json.dumps(self.options, sort_keys=True).encode()).hexdigest()[:12]


class Board:
    """A study on disk: which runs it wants, which are done."""

    def __init__(self, study: Study, root: str | Path) -> None:
        self.study, self.root = study, Path(root) / study.name

    def trial(self, cell: Cell, point: Point) -> Run:
        """A run of the search, at the first seed."""
        return self._run(cell, "trial", self.study.seeds[0], cell.tune, point)

    def _run(self, cell: Cell, kind: str, seed: int, axes: tuple[Axis, ...], point: Point) -> Run:
        chosen = {axis.key: axis.value(k) for axis, k in zip(axes, point, strict=True)}
        return Run(cell.name, kind, seed, {**self.study.options, **cell.options, **chosen, "seed": seed})

    def directory(self, run: Run) -> Path:
        return self.root / "runs" / run.key

    def manifest(self, run: Run) -> dict[str, Any]:
        try:
            return json.loads((self.directory(run) / "run.json").read_text("utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):  # a run that is about to begin has an empty one
            return {}

    def loss(self, run: Run) -> float | None:
        """The study's metric of a run that ended, infinity for one that failed for good, None for one still to do."""
        manifest = self.manifest(run)
        if manifest.get("state") == "finished":
            value = manifest["summary"].get(self.study.metric)
            return float("inf") if value is None else float(value)
        return float("inf") if self.failed(run) else None

    def failed(self, run: Run) -> bool:
        """Whether a run failed for good: twice. Runs that were interrupted do not count, nor those that diverged."""
        return self.manifest(run).get("state") != "finished" and len(self.set_aside(run, "failed")) >= 2

    def set_aside(self, run: Run, why: str) -> list[Path]:
        """Directories of earlier attempts, moved away because they ``failed`` or were ``interrupted``."""
        return sorted((self.root / why).glob(f"{run.key}-*"))

    def can_go_on(self, run: Run) -> bool:
        """Whether a run that has not ended has a checkpoint."""
        cut_short = self.manifest(run).get("state") in ("running", "stopped")
        return cut_short and any((self.directory(run) / "checkpoints").glob("*"))

    def log(self, run: Run) -> Path:
        """What the last attempt at a run has said."""
        return self.root / "logs" / f"{run.key}.log"

    def forgive(self) -> int:
        """Let the runs that failed be tried again; returns how many attempts are put aside for that."""
        attempts = sorted((self.root / "failed").glob("*"))
        folder = self.root / "forgiven"
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in attempts:
            attempt.rename(folder / f"{attempt.name}-{len(list(folder.iterdir()))}")
        return len(attempts)

    def expected(self, cell: Cell) -> int:
        """How many runs a cell comes to; while its search goes on, as far as is known."""
        losses = self.trials(cell)
        known = {run.key for run in [self.trial(cell, p) for p in losses] + self.reports(cell)}
        if not cell.tune or not climb(cell.tune, losses, self.study.trials):
            return len(known)
        points = math.prod(len(axis.values or ()) for axis in cell.grid)
        return max(len(known), self.study.trials + points * len(self.study.seeds) - (not cell.grid))

    def trials(self, cell: Cell) -> dict[Point, float]:
        """Losses of the trials that are done, found by following the search from its start."""
        losses: dict[Point, float] = {}
        while True:
            found = {p: self.loss(self.trial(cell, p)) for p in climb(cell.tune, losses, self.study.trials)}
            new = {p: loss for p, loss in found.items() if loss is not None}
            if not new:
                return losses
            losses |= new

    def wanted(self, cell: Cell) -> list[Run]:
        """Every run of a cell that can be named now and is not done: trials first, then the best for every seed."""
        losses = self.trials(cell)
        todo = [self.trial(cell, p) for p in climb(cell.tune, losses, self.study.trials)]
        runs = [run for run in todo if self.loss(run) is None]
        return runs or [run for run in self.reports(cell) if self.loss(run) is None]

    def reports(self, cell: Cell) -> list[Run]:
        """The best of the trials, for every seed and every point of the grid; empty while the search goes on."""
        losses = self.trials(cell)
        if climb(cell.tune, losses, self.study.trials):
            return []
        best = best_point(losses) if cell.tune else ()
        points = itertools.product(*(range(len(axis.values or ())) for axis in cell.grid))
        axes = cell.tune + cell.grid
        return [self._run(cell, "report", seed, axes, best + p) for p in points for seed in self.study.seeds]

    def everything(self) -> Iterator[tuple[Cell, Run, float | None]]:
        """All runs that can be named now, with their losses."""
        for cell in self.study.cells:
            points = [*self.trials(cell), *climb(cell.tune, self.trials(cell), self.study.trials)]
            for run in [self.trial(cell, p) for p in dict.fromkeys(points)] + self.reports(cell):
                yield cell, run, self.loss(run)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each run that is done: the table's raw material."""
        found = []
        for cell, run, loss in self.everything():
            if loss is None:
                continue
            manifest = self.manifest(run)
            summary = manifest.get("summary") or {}
            losses = self.trials(cell)
            found.append({
                "study": self.study.name, "cell": cell.name, "kind": run.kind, "seed": run.seed,
                "valid_loss_last": summary.get("valid_loss_last"), "valid_loss_best": summary.get("valid_loss_best"),
                "tokens": summary.get("tokens"), "optimum": _optimum(cell, losses), "run": run.key,
                "identity": manifest.get("identity"), "options": json.dumps(run.options, sort_keys=True),
            })  # fmt: skip
        return found

    def write_rows(self, path: str | Path) -> Path:
        """The rows as CSV, written whole."""
        rows = self.rows()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["study"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, path)
        return path


def _optimum(cell: Cell, losses: dict[Point, float]) -> str:
    if not cell.tune:
        return "given"
    return "inside" if losses and inside(cell.tune, losses) else "edge"
