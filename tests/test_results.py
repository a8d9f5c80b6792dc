"""The committed rows of studies are whole: every trial, every seed, and no optimum at an edge that is not marked."""

import json
from pathlib import Path

import pytest

from isoloco.climb import inside
from isoloco.report import read_rows as rows_of
from isoloco.report import table
from isoloco.study_file import Study, load

RESULTS = sorted((Path(__file__).parent.parent / "docs" / "results").glob("*.csv"))


def problems(study: Study, rows: list[dict[str, str]]) -> list[str]:
    """What is missing in the rows of a study, or not marked; recomputed from the options of each row."""
    found = []
    for cell in study.cells:
        own = [row for row in rows if row["cell"] == cell.name]
        trials = {row["run"]: row for row in own if row["kind"] == "trial"}
        if len(trials) != (study.trials if cell.tune else 0):
            found.append(f"{cell.name}: {len(trials)} trials of {study.trials}")
        losses = {}
        for row in trials.values():
            options = json.loads(row["options"])
            reach = range(-20, 21)
            point = tuple(next(k for k in reach if axis.value(k) == options[axis.key]) for axis in cell.tune)
            losses[point] = float(row[study.metric])
        if cell.tune and losses:
            marked = {row["optimum"] for row in own}
            if marked != {"inside" if inside(cell.tune, losses) else "edge"}:
                found.append(f"{cell.name}: optimum marked {marked}")
        reports = [row for row in own if row["kind"] == "report"]
        points = {tuple(json.loads(row["options"])[axis.key] for axis in cell.grid) for row in reports}
        wanted = 1
        for axis in cell.grid:
            wanted *= len(axis.values or ())
        if len(points) != wanted:
            found.append(f"{cell.name}: {len(points)} points of the grid of {wanted}")
        for point in points:
            seeds = {
                int(row["seed"])
                for row in reports
                if tuple(json.loads(row["options"])[axis.key] for axis in cell.grid) == point
            }
            if seeds != set(study.seeds):
                found.append(f"{cell.name} at {point}: seeds {sorted(seeds)} of {study.seeds}")
    return found


def test_there_are_results():
    assert {path.stem for path in RESULTS} >= {"mini_table1"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_rows_are_whole(path):
    assert problems(load(path.stem), rows_of(path)) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_missing_row_is_noticed(path):
    study, rows = load(path.stem), rows_of(path)
    for drop in (0, len(rows) // 2, len(rows) - 1):
        twice = [r["run"] for r in rows].count(rows[drop]["run"]) > 1 and rows[drop]["kind"] == "trial"
        rest = [row for i, row in enumerate(rows) if i != drop]
        assert twice or problems(study, rest)


def test_an_unmarked_edge_is_noticed():
    study, rows = load("mini_table1"), rows_of(next(path for path in RESULTS if path.stem == "mini_table1"))
    assert problems(study, [{**row, "optimum": "given"} for row in rows])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_shows_the_table_that_the_rows_make(path):
    docs = path.parent.parent
    pages = (docs / "results.md").read_text("utf-8") + (docs / "mini-paper.md").read_text("utf-8")
    assert table(load(path.stem), rows_of(path)) in pages
