"""Study files: the packaged ones, scales, and mistakes."""

import pytest

from isoloco.recipe import packaged
from isoloco.study_file import load, scales

EVERY = [(name, scale) for name in packaged("studies") for scale in scales(name) or [None]]


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_packaged_studies_load_and_are_fair(name, scale):
    """Cells that are tuned have the same number of trials, enough for every axis; three seeds, but on GPUs."""
    study = load(name, scale)
    assert study.title
    assert study.name == (name if scale is None else study.name)
    large = scale not in (None, "mini")
    assert len(study.seeds) >= 3 or large or not any(cell.tune for cell in study.cells)
    for cell in study.cells:
        if cell.tune:
            assert study.trials >= 1 + 2 * len(cell.tune)


SCALED = """
options: {sync_every: 2}
cells: {a: {method: diloco}, b: {method: isoloco, outer.lr: 1.0}}
scales:
  small: {options: {workers: 4}, seeds: [7]}
  large: {options: {workers: 8, sync_every: 4}, trials: 3, cells: {b: {outer.momentum: 0.5}, c: {method: ties}}}
  other: quickstart
"""


def test_a_scale_lies_over_its_file(study):
    with pytest.raises(ValueError, match="several scales: choose one with --scale, of small, large, other"):
        study(SCALED)
    small, large, other = (load("try.yaml", scale) for scale in ("small", "large", "other"))
    assert (small.name, large.name, other.name) == ("try-small", "try-large", "quickstart")
    assert small.options == {"sync_every": 2, "workers": 4}
    assert [cell.name for cell in small.cells] == ["a", "b"]
    assert small.seeds == (7,)
    assert large.options == {"sync_every": 4, "workers": 8}
    assert [cell.name for cell in large.cells] == ["b", "c"]
    assert large.cells[0].options == {"method": "isoloco", "outer.lr": 1.0, "outer.momentum": 0.5}
    assert large.trials == 3
    for scale, message in (("smal", "unknown scale 'smal'; nearest: small"), (None, "choose one")):
        with pytest.raises(ValueError, match=message):
            load("try.yaml", scale)
    with pytest.raises(ValueError, match="one scale only: leave --scale small out"):
        load("quickstart", "small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "takes 'recipe' and 'cells'"),
        ("cell: {}\ncells: {}", "unknown key 'cell'; nearest: cells"),
        ("cells: {a: 3}", "cell a: takes a mapping"),
        ("cells: {a: {metod: diloco}}", "cell a: unknown option 'metod'; nearest: method"),
        ("cells: {a: {tune: {outer.lr: {start: 1.0}}}}", "outer.lr takes a list, or a start and a factor or step"),
        ("cells: {a: {tune: {outer.lr: {start: 1.0, factr: 2}}}}", "outer.lr takes a list"),
        ("cells: {a: {tune: {outer.lrr: [1.0]}}}", "unknown option 'outer.lrr'"),
        ("cells: {a: {grid: {workers: [3]}}}", "does not divide among 3 workers"),
        ("cells: {a: {ours: [inner.lr]}}", "cell a: unknown option of the cell, in ours: 'inner.lr'"),
        ("cells: {a: {paper: low}}", "cell a: paper takes the loss"),
        ("cells: {a: {}}\nbaseline: b", "unknown cell as baseline 'b'"),
        ("cells: {a: {}}\nlayout: {rows: method}", "layout takes rows and columns"),
        ("scales: {}\ncells: 3", "takes 'recipe' and 'cells'"),
        ("scales: [a]\ncells: {a: {}}", "scales takes a mapping"),
    ],
)
def test_a_mistake_in_a_study_is_one_line(text, message, study):
    with pytest.raises(ValueError, match=message) as raised:
        study(text)
    assert "\n" not in str(raised.value)
