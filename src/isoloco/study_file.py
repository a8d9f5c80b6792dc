"""Study files: the cells of a table, at one scale or several, read and checked before any run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .climb import Axis
from .config import RunConfig, unknown
from .recipe import build_config, flatten, load_yaml, numbers

KEYS = ("name", "title", "recipe", "options", "cells", "seeds", "trials", "metric", "baseline", "layout", "scales")
SCALED = tuple(key for key in KEYS if key not in ("name", "title", "scales"))


@dataclass(frozen=True)
class Cell:
    """One entry of the table: options over the recipe, axes that are tuned, and a grid that is run whole.

    ``paper`` is the loss that the paper reports for it; ``ours`` names the options for which the paper gives no value.
    """

    name: str
    options: dict[str, Any]
    tune: tuple[Axis, ...] = ()
    grid: tuple[Axis, ...] = ()
    paper: float | None = None
    ours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A study file, at one of its scales where it has some."""

    name: str
    title: str
    recipe: str
    options: dict[str, Any]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    trials: int
    metric: str
    baseline: str = ""
    layout: dict[str, str] = field(default_factory=dict)

    def config(self, cell: Cell, options: Mapping[str, Any] | None = None) -> RunConfig:
        """The resolved config of a cell with these options of a run; at the start of its ladders without them."""
        if options is None:
            options = self.options | cell.options | {axis.key: axis.value(0) for axis in cell.tune + cell.grid}
        return build_config(self.recipe, dict(options))[0]


def scales(name: str) -> list[str]:
    """Names of a study's scales; none where it has one size only."""
    return list(load_yaml(name, "studies")[1].get("scales") or {})


def load(name: str, scale: str | None = None) -> Study:
    """A packaged study by name, or a YAML file. ValueError says what is wrong with it, before any of its runs.

    A file with ``scales`` holds, for each, what it lays over the rest of the file (options are added to the options,
    cells that it names replace the file's, each laid over the one of that name), or the name of another study.
    """
    label, tree = load_yaml(name, "studies")
    if "scales" not in tree:
        _check_whole(tree, label)
    if alien := next((key for key in tree if key not in KEYS), None):
        raise ValueError(f"{label}: {unknown('key', str(alien), KEYS)}")
    given = tree.pop("scales", None) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{label}: scales takes a mapping from name to what it changes, got {given!r}")
    tree.setdefault("name", Path(name).stem)
    if scale is None and given:
        raise ValueError(f"{label} comes at several scales: choose one with --scale, of {', '.join(map(str, given))}")
    if scale is not None:
        if not given:
            raise ValueError(f"{label} has one scale only: leave --scale {scale} out")
        if scale not in given:
            raise ValueError(f"{label}: {unknown('scale', scale, map(str, given))}")
        if isinstance(given[scale], str):
            return load(given[scale])
        label = f"{label}, scale {scale}"
        tree = _laid_over(tree, given[scale], label) | {"name": f"{tree['name']}-{scale}"}
    return _study(tree, label)


def _check_whole(tree: dict[str, Any], label: str) -> None:
    if not isinstance(tree.get("cells"), dict) or "recipe" not in tree:
        raise ValueError(f"{label}: takes 'recipe' and 'cells', a mapping from name to options")


def _laid_over(tree: dict[str, Any], changes: Any, label: str) -> dict[str, Any]:
    if not isinstance(changes, dict):
        raise ValueError(f"{label}: takes a mapping, or the name of another study, got {changes!r}")
    if alien := next((key for key in changes if key not in SCALED), None):
        raise ValueError(f"{label}: {unknown('key', str(alien), SCALED)}")
    cells = _mapping(tree.get("cells"), "cells", label)
    new = _mapping(changes.get("cells"), "cells", label)
    merged = {
        cell: _mapping(cells.get(cell), f"cell {cell}", label) | _mapping(block, f"cell {cell}", label)
        for cell, block in (new or cells).items()
    }
    options = [flatten(_mapping(part.get("options"), "options", label), label) for part in (tree, changes)]
    return {**tree, **changes, "cells": merged, "options": options[0] | options[1]}


def _mapping(given: Any, what: str, label: str) -> dict[str, Any]:
    if not isinstance(given, dict | None):
        kind = " of options" if what != "cells" else ""
        raise ValueError(f"{label}, {what}: takes a mapping{kind}, got {given!r}")
    return dict(given or {})


def _study(tree: dict[str, Any], label: str) -> Study:
    _check_whole(tree, label)
    study = Study(
        name=tree["name"],
        title=tree.get("title", ""),
        recipe=tree["recipe"],
        options=flatten(tree.get("options") or {}, label),
        cells=tuple(_cell(name, given, label) for name, given in tree["cells"].items()),
        seeds=tuple(tree.get("seeds", (42,))),
        trials=int(tree.get("trials", 0)),
        metric=tree.get("metric", "valid_loss_last"),
        baseline=tree.get("baseline", ""),
        layout=_mapping(tree.get("layout"), "layout", label),
    )
    names = [cell.name for cell in study.cells]
    if study.baseline and study.baseline not in names:
        raise ValueError(f"{label}: {unknown('cell as baseline', study.baseline, names)}")
    if study.layout and study.layout.keys() != {"rows", "columns"}:
        raise ValueError(f"{label}: layout takes rows and columns, an option each, got {', '.join(study.layout)}")
    for cell in study.cells:
        try:
            study.config(cell)
        except ValueError as error:
            raise ValueError(f"{label}, cell {cell.name}: {error}") from None
    return study


def _cell(name: str, given: Any, label: str) -> Cell:
    block = _mapping(given, f"cell {name}", label)
    where = f"{label}, cell {name}"
    tune, grid = (_axes(block.pop(part, None), where) for part in ("tune", "grid"))
    paper, ours = block.pop("paper", None), block.pop("ours", [])
    cell = Cell(name, flatten(block, where), tune, grid, paper, tuple(ours))
    has = [*cell.options, *(axis.key for axis in tune + grid)]
    if alien := next((key for key in ours if key not in has), None):
        raise ValueError(f"{where}: {unknown('option of the cell, in ours:', str(alien), has)}")
    if not isinstance(paper, float | int | None):
        raise ValueError(f"{where}: paper takes the loss that the paper reports, got {paper!r}")
    return cell


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
