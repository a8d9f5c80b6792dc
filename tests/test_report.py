"""Reports of studies and comparisons of runs: tables from rows, pictures from runs, one page that stands alone."""

import csv
import io
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from isoloco import report_plots
from isoloco.cli import main
from isoloco.config import to_dict
from isoloco.report import csv_text, entries, html_table, latex, markdown, pivot_of, read_rows, table_of
from isoloco.report_html import build_page
from isoloco.report_plots import Picture, draw, pictures
from isoloco.rundir import RunDir
from isoloco.study_board import Board
from isoloco.study_file import load
from isoloco.tracking import Tracker

ROUNDS = 6
STUDY = """
name: try
title: Losses & workers
recipe: small.yaml
seeds: [1, 2]
trials: 3
baseline: dp
layout: {rows: method, columns: workers}
cells:
  dp: {method: dp, paper: 2.9}
  diloco_w2: {method: diloco, workers: 2, paper: 3.0}
  diloco_w4: {method: diloco, workers: 4}
  isoloco_w2: {method: isoloco, workers: 2, tune: {inner.lr: {start: 1.0e-3, factor: 2}}}
  isoloco_w4: {method: isoloco, workers: 4, grid: {sync_every: [5, 10]}}
"""
BASE = {"dp": 3.0, "diloco": 3.2, "isoloco": 2.8}


def loss_of(options: dict) -> float:
    lr = abs(options.get("inner.lr", 1e-3) * 1e3 - 2) / 10
    slow = options.get("workers", 2) / 40 + options.get("sync_every", 10) / 100
    return BASE[options["method"]] + options["seed"] / 50 + slow + lr


def write_run(path: Path, board: Board, options: dict) -> None:
    """A run's directory, by the parts that write it in training, with a curve that ends where we say."""
    cell = next(c for c in board.study.cells if c.options["method"] == options["method"])
    config = board.study.config(cell, {**options, "out_dir": str(path)})
    run_dir = RunDir.create(config)
    run_dir.write_config(to_dict(config), {})
    last = loss_of(options)
    with Tracker(run_dir, config=config, total_rounds=ROUNDS, total_steps=60, quiet=True) as tracker:
        for r in range(1, ROUNDS + 1):
            where = {"round": r, "step": 10 * r, "tokens": 10_000 * r}
            tracker.round({**where, "train_loss": last + 1 / r, "train_loss_spread": 0.1, "inner_s": 0.1 * r})
            if not config.is_dp:
                sigma = {"before": [1.0, 0.4, 0.1], "after": [0.5, 0.5, 0.5], "stable_rank": 1.2, "rms_over_mean": 1.1}
                tracker.spectra(round=r, step=10 * r, matrices={"model.layers.0.mlp.weight": sigma})
        found = {"loss": last, "perplexity": 9.0, "bits_per_byte": None, "eval_s": 0.0}
        tracker.evaluation(round=ROUNDS, step=60, tokens=60_000, split="valid", **found)
        wire = (60 if config.is_dp else config.workers) * 1e6
        summary = {**tracker.figures(), "tokens": 60_000, "wire_bytes_per_worker": int(wire)}
        run_dir.update(state="finished", summary=summary)
    run_dir.release()


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A study whose runs are all there."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "small.yaml").write_text("global_batch_size: 8\nsync_every: 10\nbudget: {steps: 60}\n")
    (folder / "try.yaml").write_text(STUDY.replace("small.yaml", str(folder / "small.yaml")))
    board = Board(load(str(folder / "try.yaml")), folder / "studies")
    while wanted := [run for cell in board.study.cells for run in board.wanted(cell)]:
        for run in wanted:
            if board.loss(run) is None:
                write_run(board.directory(run), board, run.options)
    board.write_rows(board.root / "rows.csv")
    return board


@pytest.fixture(scope="module")
def rows(board):
    return read_rows(board.root / "rows.csv")


# tables


def test_entries_are_cells_and_points_with_their_seeds(board, rows):
    found = entries(board.study, rows)
    labels = [entry.label for entry in found]
    assert labels == [
        "dp", "diloco_w2", "diloco_w4", "isoloco_w2", "isoloco_w4, sync_every 5", "isoloco_w4, sync_every 10",
    ]  # fmt: skip
    assert all(len(entry.losses) == 2 for entry in found)
    assert found[3].settings == {"inner.lr": 0.002}
    assert found[3].trials == 3
    assert found[4].mean == pytest.approx(2.8 + 0.03 + 0.1 + 0.05 + 0.1)
    assert found[4].deviation == pytest.approx(0.02 / 2**0.5)


def test_every_format_has_the_same_table(board, rows):
    table = table_of(board.study, rows)
    read = list(csv.reader(io.StringIO(csv_text(table))))
    assert read == [table.head, *table.body]
    assert table.head[-3:] == ["to dp", "paper", "to the paper"]
    [dp, diloco, *_] = table.body
    assert dp[-3:] == ["+0.0000", "2.900", f"{3.0 + 0.03 + 0.05 + 0.1 + 0.1 - 2.9:+.4f}"]
    assert diloco[-3] == "+0.2000"
    [(i, j)] = table.bold
    best = min(table.body, key=lambda line: float(line[3]))
    assert table.body[i] == best
    for text in (markdown(table), latex(table), html_table(table)):
        bold = {"|": "**{}**", "\\": "\\textbf{{{}}}", "<": "<b>{}</b>"}[text[0]]
        assert text.count(bold.format(best[j])) == 1
        assert text.count("\n") >= len(table.body)
    assert "isoloco\\_w4" in latex(table)
    assert "_w4" not in latex(table).replace("\\_", "")


def test_the_layout_has_the_best_of_each_place_and_the_papers_value(board, rows):
    pivot = pivot_of(board.study, rows)
    assert pivot is not None
    assert pivot.head == ["", "workers 2", "workers 4"]
    assert [line[0] for line in pivot.body] == ["diloco", "isoloco"]
    assert pivot.body[0][1].endswith(" (3.000)")
    assert pivot.bold == {(1, 1), (1, 2)}
    assert pivot.body[1][2].startswith(f"{2.8 + 0.03 + 0.1 + 0.05 + 0.1:.4f} ±")


def test_a_run_that_failed_is_in_the_table(board, rows):
    failed = [{**row, "valid_loss_last": ""} if row["cell"] == "dp" else row for row in rows]
    [dp, *_] = table_of(board.study, failed).body
    assert dp[3] == "failed"
    assert dp[-1] == dp[-3] == "-"


def test_tables_are_made_from_rows_alone_in_one_command(board, rows, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = str(board.root.parent.parent / "try.yaml")
    command = ["study", "report", study, "--csv", str(board.root / "rows.csv")]
    assert main(command) == 0
    assert markdown(table_of(board.study, rows)) in capsys.readouterr().out
    assert main([*command, "--format", "latex"]) == 0
    assert latex(table_of(board.study, rows)) in capsys.readouterr().out
    assert main([*command, "--root", "nowhere", "--out", "made"]) == 0
    made = {path.name for path in Path("made").iterdir()}
    assert {"table.md", "table.csv", "table.tex", "layout.md", "loss-workers.png", "sensitivity.png"} <= made
    assert "loss-tokens.png" not in made  # it takes the runs themselves
    assert main(["study", "report", study, "--csv", "none.csv"]) == 2
    assert "no rows at none.csv" in capsys.readouterr().err


# pages


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            raise AssertionError(f"{tag} closes what is not open")


def check_page(path: Path, pictures: int) -> str:
    text = path.read_text("utf-8")
    page = Page(text)
    assert page.open == []
    assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import|<script|<link|<iframe", re.sub(r"base64,[^\"]+", "", text))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == pictures
    for attributes in images:
        assert len(attributes["alt"] or "") > 40
        assert (attributes["src"] or "").startswith("data:image/png;base64,")
    assert any(tag == "meta" and "width=device-width" in (a.get("content") or "") for tag, a in page.tags)
    assert text.count("<table>") == text.count("<div class=scroll><table>")  # wide tables scroll on a phone
    return text


def test_the_page_of_a_study_stands_alone(board, tmp_path):
    study, root = str(board.root.parent.parent / "try.yaml"), str(board.root.parent)
    assert main(["study", "report", study, "--root", root, "--out", str(tmp_path / "made")]) == 0
    drawn = sorted(path.name for path in (tmp_path / "made").glob("*.png"))
    assert drawn == [
        "loss-bytes.png", "loss-sync_every.png", "loss-time.png", "loss-tokens.png", "loss-workers.png",
        "sensitivity.png", "spectra.png",
    ]  # fmt: skip
    text = check_page(tmp_path / "made" / "index.html", len(drawn))
    assert text.count("Losses &amp; workers") == 2  # title and heading, not above the table once more
    for name in drawn:
        data = (tmp_path / "made" / name).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert width > 600
        assert height > 400


def test_panels_side_by_side_are_scrolled_on_a_phone(tmp_path):
    one = Picture(draw(tmp_path / "one.png", lambda axes: None), "A picture.")
    three = Picture(draw(tmp_path / "three.png", lambda axes: None, size=(15.0, 4.6), panels=3), "Three of them.")
    text = build_page("Page", [], [], [one, three], [])
    assert re.findall(r"<div class=scroll><img( class=panels)? alt=\"(.*?)\"", text) == [
        ("", one.alt), (" class=panels", three.alt),
    ]  # fmt: skip


def test_a_cell_looks_the_same_in_every_picture(board, tmp_path, monkeypatch):
    figures = {}

    def keep(figure, path: Path) -> Path:
        figures[path.stem] = {
            line.get_label(): (line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines
        }
        return path

    def first_sends_nothing(entry, runs):
        curve = measured(entry, runs)
        return replace(curve, bytes_per_token=0.0) if curve and entry.label == "dp" else curve

    measured = report_plots._mean_curve
    monkeypatch.setattr(report_plots, "_mean_curve", first_sends_nothing)
    monkeypatch.setattr("isoloco.plots.save", keep)
    pictures(board.study, read_rows(board.root / "rows.csv"), board.root / "runs", tmp_path)
    everyone = figures["loss-tokens"]
    assert len(set(everyone.values())) == len(everyone)
    for name in ("loss-bytes", "loss-time"):
        assert figures[name].items() <= everyone.items()
        assert len(figures[name]) > 1
    assert everyone.keys() - figures["loss-bytes"].keys() == {"dp"}


def test_runs_are_compared(board, tmp_path, capsys):
    runs = [str(board.directory(board.reports(cell)[0])) for cell in board.study.cells[:3]]
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out
    assert all(Path(run).name in said for run in runs)
    assert "| method |" in said
    assert "| workers |" in said
    assert "global_batch_size" not in said  # in which they do not differ
    assert f"**{loss_of({'method': 'dp', 'seed': 1}):.4f}**" in said
    assert main(["compare", *runs, "--out", str(tmp_path / "made")]) == 0
    text = check_page(tmp_path / "made" / "index.html", 1)
    assert Path(runs[0]).name in text
    assert main(["compare", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
