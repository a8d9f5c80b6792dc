"""The paper's studies carry the paper's settings: resolved configs against the numbers of its tables."""

import csv
from functools import cache
from pathlib import Path

import pytest

from isoloco.config import RunConfig, get
from isoloco.study_file import Cell, Study, load

METHODS = {
    "AdamW DP": "dp", "DiLoCo SGD": "diloco_sgd", "DiLoCo": "diloco", "DiLoCo SGD + Iso-C": "iso_c",
    "IsoLoCo": "isoloco", "TIES": "ties", "DARE": "dare", "TSV-M": "tsv", "Iso-C": "iso_c", "Iso-CTS": "iso_cts",
}  # fmt: skip
COLUMNS = {"R": "workers", "H": "sync_every"}
TUNED = ("inner.lr", "outer.lr", "outer.momentum")


with (Path(__file__).parent / "data" / "paper_tables.csv").open(encoding="utf-8", newline="") as file:
    PAPER = list(csv.DictReader(file))


def section(quantity: str, scale: str = "") -> float:
    [text] = [r["value"] for r in PAPER if (r["table"], r["quantity"], r["scale"]) == ("Section 3.1", quantity, scale)]
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


@cache
def resolved(name: str, scale: str) -> tuple[Study, dict[str, RunConfig]]:
    """A study, and the config of each of its cells."""
    study = load(name, scale)
    return study, {cell.name: study.config(cell) for cell in study.cells}


def cell_of(study: Study, configs: dict[str, RunConfig], method: str, column: str) -> Cell:
    """The one cell of a method, and of a number of workers or of steps."""
    key, _, value = column.partition("=")
    found = [
        cell
        for cell in study.cells
        if cell.options["method"] == METHODS[method]
        and (not key or get(configs[cell.name], COLUMNS[key]) == int(value))
        and cell.paper is not None
    ]
    assert len(found) == 1, (method, column)
    return found[0]


# study, scale, the paper's table of losses and the one of values, methods that the study has of them
STUDIES = [
    ("table1", "178m", "1", "5", None),
    ("table2", "178m", "2", "6", None),
    ("table2", "512m", "2", "7", None),
    ("table4", "178m", "4", "8", None),
    ("figure3", "178m", "2", "6", ("DiLoCo", "IsoLoCo")),
]


def of_table(table: str, scale: str, methods: tuple[str, ...] | None, study: str) -> list[dict[str, str]]:
    rows = [r for r in PAPER if (r["table"], r["scale"]) == (table, scale) and (not methods or r["method"] in methods)]
    if study == "figure3":  # it begins at 8 workers
        rows = [r for r in rows if int(r["column"].removeprefix("R=")) >= 8]
    assert rows
    return rows


@pytest.mark.parametrize(("name", "scale", "losses", "values", "methods"), STUDIES)
def test_values_and_losses_are_those_of_the_paper(name, scale, losses, values, methods):
    study, configs = resolved(name, scale)
    checked: dict[str, set[str]] = {}
    for row in of_table(values, scale, methods, name):
        cell = cell_of(study, configs, row["method"], row["column"])
        assert get(configs[cell.name], row["quantity"]) == float(row["value"]), row
        assert row["quantity"] not in cell.ours
        assert not cell.tune
        checked.setdefault(cell.name, set()).add(row["quantity"])
    for row in of_table(losses, scale, methods, name):
        assert cell_of(study, configs, row["method"], row["column"]).paper == float(row["value"]), row
    for row in PAPER:
        if (row["table"], row["scale"]) == ("Appendix A", scale) and study.cells[0].options["method"] == "dp":
            assert get(configs[study.cells[0].name], row["quantity"]) == float(row["value"])
            checked.setdefault("dp", set()).add("inner.lr")
    for cell in study.cells:  # every value that was tuned is the paper's, or is marked
        config = configs[cell.name]
        tuned = {key for key in TUNED if key in cell.options or key in [axis.key for axis in cell.tune]}
        assert tuned <= checked.get(cell.name, set()) | set(cell.ours), cell.name
        if config.outer.momentum and not config.is_dp:
            assert tuned == set(TUNED), cell.name  # nothing is left to a preset


PAPER_STUDIES = [
    ("table1", "178m"), ("table2", "178m"), ("table2", "512m"), ("table3", "1b"), ("table4", "178m"),
    ("newton_schulz", "178m"), ("figure3", "178m"), ("ablations", "178m"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scale"), PAPER_STUDIES)
def test_what_all_runs_share_is_the_papers(name, scale):
    study, configs = resolved(name, scale)
    batch = {"524k": 524288, "2M": 2097152}
    [tokens] = [batch[r["value"]] for r in PAPER if (r["quantity"], r["scale"]) == ("batch tokens", scale)]
    for cell in study.cells:
        config = configs[cell.name]
        assert config.model.preset == scale
        assert config.model.seq_len == section("sequence length")
        assert config.global_batch_size * config.model.seq_len == tokens
        assert config.budget.tokens_per_parameter == section("tokens per parameter")
        assert config.inner.warmup_frac == section("warm-up")
        assert config.inner.betas == (section("beta1"), section("beta2"))
        assert config.is_dp or config.inner.weight_decay == section("weight decay")
        assert study.metric == "valid_loss_best"
        assert name in ("table4",) or config.sync_every == section("H")
        assert name in ("table2", "figure3") or config.workers == section("workers")
        assert config.worker_batch_size % (config.micro_batch_size or 1) == 0
        if config.inner.optimizer == "muon":
            assert set(cell.ours) == set(TUNED)
        if cell.tune:
            assert {axis.key for axis in cell.tune} <= set(cell.ours)


def test_other_losses_of_the_text():
    def paper(table: str, method: str) -> float:
        [value] = [r["value"] for r in PAPER if (r["table"], r["method"], r["quantity"]) == (table, method, "loss")]
        return float(value)

    losses = {s: {c.name: c.paper for c in resolved(s, "178m")[0].cells} for s in ("newton_schulz", "ablations")}
    assert losses["newton_schulz"] == {
        "svd_mean": paper("9", "SVD, mean"),
        "newton_schulz_rms": paper("9", "Newton-Schulz, RMS"),
        "newton_schulz_spectral": paper("9", "Newton-Schulz, spectral"),
        "newton_schulz_mean": None,
    }
    # the paper contradicts itself; the study file says so
    assert paper("9", "SVD, mean") != paper("Section 4.3", "IsoLoCo") == losses["ablations"]["isoloco"]
    for name in ("clip_high", "clip_low"):
        assert losses["ablations"][name] == paper("Section 4.5", name)
    assert {c.name: c.paper for c in resolved("table3", "1b")[0].cells} == {
        "diloco": paper("3", "DiLoCo"), "isoloco": paper("3", "IsoLoCo"),
    }  # fmt: skip
