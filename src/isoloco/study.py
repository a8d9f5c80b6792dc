"""Studies: a named set of runs that fills one table or figure.

A study is a YAML file of cells. A cell has options over a recipe, and may have axes to be tuned: its trials climb from
a start along ladders, one axis after the other, until no neighbour of the best is better, and go on around it up to
the study's number of trials, the same for every cell. The best is then run for every seed.

The run directory is the truth: a run is keyed by the hash of its options, claimed by a file lock, and is a subprocess
of its own. So a study can be stopped and started, by several processes at once; what is done is not done again.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .climb import Axis, Point, best_point, climb, inside
from .config import unknown
from .recipe import build_config, flatten, load_yaml, numbers


@dataclass(frozen=True)
class Cell:
    """One entry of the table: options over the recipe, axes that are tuned, and a grid that is run whole."""

    name: str
    options: dict[str, Any]
    tune: tuple[Axis, ...] = ()
    grid: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class Study:
    """A study file."""

    name: str
    title: str
    recipe: str
    options: dict[str, Any]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    trials: int
    metric: str
    columns: dict[str, Any] = field(default_factory=dict)


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


def load(name: str) -> Study:
    """A packaged study by name, or a YAML file. ValueError says what is wrong with it, before any of its runs."""
    label, tree = load_yaml(name, "studies")
    if not isinstance(tree.get("cells"), dict) or "recipe" not in tree:
        raise ValueError(f"{label}: takes 'recipe' and 'cells', a mapping from name to options")
    known = [item.name for item in fields(Study)]
    if alien := next((key for key in tree if key not in known), None):
        raise ValueError(f"{label}: {unknown('key', str(alien), known)}")
    cells = []
    for cell, given in tree["cells"].items():
        if not isinstance(given, dict | None):
            raise ValueError(f"{label}, cell {cell}: takes a mapping of options, got {given!r}")
        block = dict(given or {})
        where = f"{label}, cell {cell}"
        tune, grid = (_axes(block.pop(part, None), where) for part in ("tune", "grid"))
        cells.append(Cell(cell, flatten(block, where), tune, grid))
    study = Study(
        name=tree.get("name", Path(name).stem),
        title=tree.get("title", ""),
        recipe=tree["recipe"],
        options=flatten(tree.get("options") or {}, label),
        cells=tuple(cells),
        seeds=tuple(tree.get("seeds", (42,))),
        trials=int(tree.get("trials", 0)),
        metric=tree.get("metric", "valid_loss_last"),
    )
    for cell in study.cells:
        first = {axis.key: axis.value(0) for axis in cell.tune + cell.grid}
        try:
            build_config(study.recipe, {**study.options, **cell.options, **first})
        except ValueError as error:
            raise ValueError(f"{label}, cell {cell.name}: {error}") from None
    return study


def _axes(specs: dict[str, Any] | None, where: str) -> tuple[Axis, ...]:
    axes = []
    for key, spec in (specs or {}).items():
        try:
            given: dict[str, Any] = numbers(spec) if isinstance(spec, dict) else {"values": tuple(numbers(spec))}
            axes.append(Axis(key=key, **given))
            whole = axes[-1].value(0) is not None and given.keys() & {"values", "factor", "step"}
        except TypeError:
            whole = False
        if not whole:
            raise ValueError(f"{where}: {key} takes a list, or a start and a factor or step (and low, high)")
    return tuple(axes)


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


def run_study(
    board: Board,
    *,
    jobs: int = 1,
    threads: int | None = None,
    say: Callable[[str], None] = print,
    rows: Path | None = None,
) -> bool:
    """Run what is left, ``jobs`` at a time; several processes may do so at once. False if a run failed for good."""
    board.root.mkdir(parents=True, exist_ok=True)
    threads = threads or max(1, (os.cpu_count() or 1) // jobs)
    active: dict[str, tuple[Run, subprocess.Popen[bytes], Any]] = {}
    while True:
        for key, (run, process, lock) in list(active.items()):
            if process.poll() is not None:
                _settle(board, run, process.returncode, say)
                lock.release()
                del active[key]
                if rows:
                    board.write_rows(rows)
        wanted = [run for cell in board.study.cells for run in board.wanted(cell)]
        for run in wanted:
            if len(active) >= jobs:
                break
            if run.key not in active and (lock := _claim(board, run)) is not None:
                if board.loss(run) is not None:  # somebody else finished it in between
                    lock.release()
                    continue
                active[run.key] = (run, _start(board, run, threads), lock)
                say(f"{run.cell} {run.kind} seed {run.seed}: {_told(board, run)}")
        if not active and not wanted:
            break
        time.sleep(1.0)
    if rows:
        board.write_rows(rows)
    return not any(board.failed(run) for _, run, _ in board.everything())


def _claim(board: Board, run: Run) -> Any | None:
    """The run's file lock, or None where another process has it."""
    from filelock import FileLock, Timeout

    folder = board.root / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{run.key}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _start(board: Board, run: Run, threads: int) -> subprocess.Popen[bytes]:
    """Start a run as a process of its own. What a dead process left in its directory is moved away first."""
    directory = board.directory(run)
    if directory.exists():
        _set_aside(board, run, "interrupted")
    logs = board.root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.executable,
        "-m",
        "isoloco",
        "train",
        board.study.recipe,
        f"--out_dir={directory}",
        f"--compute.threads={threads}",
    ]
    argv += [f"--{key}={_spelled(value)}" for key, value in run.options.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (logs / f"{run.key}.log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)


def _spelled(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _settle(board: Board, run: Run, code: int, say: Callable[[str], None]) -> None:
    loss = board.loss(run)
    if loss is not None and code == 0:
        say(f"{run.cell} {run.kind} seed {run.seed}: {board.study.metric} {loss:.4f}  {_told(board, run)}")
        return
    log = (board.root / "logs" / f"{run.key}.log").read_text("utf-8", "replace").strip().splitlines()
    why = "interrupted" if board.manifest(run).get("state") == "stopped" else "failed"
    say(f"{run.cell} {run.kind} seed {run.seed}: {why} ({log[-1] if log else f'exit code {code}'})")
    _set_aside(board, run, why)


def _set_aside(board: Board, run: Run, why: str) -> None:
    folder = board.root / why
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{run.key}-{len(board.set_aside(run, why))}"
    directory = board.directory(run)
    if directory.exists():
        directory.rename(place)
    else:
        place.mkdir()


def _told(board: Board, run: Run) -> str:
    common = {*board.study.options, "seed"}
    return ", ".join(f"{k} {v}" for k, v in run.options.items() if k not in common)
