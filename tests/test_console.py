"""What a person sees: header, bar or lines, evaluations, final table, on every kind of stream."""

import io
import math
import os
import re

import pytest

from isoloco import console
from isoloco.tracking import RunDir, Tracker
from told import H, W, config, play, tracker


@pytest.fixture
def no_picture(monkeypatch):
    """Leaves out what another file tests, and what takes longest."""
    monkeypatch.setattr("isoloco.plots.overview", lambda path: path / "overview.png")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(t: Tracker, run_dir: RunDir) -> None:
    t.header([("parameters", "1.3 M")], {"workers": "command line", "sync_every": "recipe quickstart"})
    play(t)
    t.finish(
        {"wall_s": 125.0}, files=[("model", run_dir.path / "model")], next_commands=["isoloco evaluate [x]"],
        sample="Fellow \x1b[31m[red]citizens\u2713\n\n \n\nof the Senate",
    )  # fmt: skip


def test_without_a_terminal_there_are_plain_lines_only(tmp_path, monkeypatch, no_picture):
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir.create(config(tmp_path / "r"))
    out = io.StringIO()
    with tracker(run_dir, config(run_dir.path), stream=out) as t:
        shown(t, run_dir)
    text = out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), "a control code"
    assert re.search(r"citizens\u2713\n *\n  of the Senate\n", text), "one blank line of several"
    for part in (
        "parameters", "command line", "workers 2", "sync_every 5", "ETA",
        " 70%  round 3/4  step 3/5 of worker 2/2  loss",
        "validation loss, best  2.5000  (step 10)", "validation loss, last  2.6000  (step 20)", "perplexity",
        "bits per byte", "400 B sent, 200 B received", "2:05", "isoloco evaluate [x]", "[red]citizens\u2713",
        "  model     r/model", "r/overview.png",
    ):  # fmt: skip
        assert part in text, part
    evaluations = [line for line in text.splitlines() if "valid loss" in line]
    assert [line.endswith("best") for line in evaluations] == [True, True, False, False]


def test_lines_of_progress_keep_their_distance(tmp_path):
    run_dir = RunDir.create(config(tmp_path / "r"))
    out = io.StringIO()
    with tracker(run_dir, config(run_dir.path), stream=out) as t:
        play(t)
    assert "ETA" not in out.getvalue()


def test_the_loss_of_a_line_does_not_jump_with_the_turns_of_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    run_dir = RunDir.create(config(tmp_path / "r"))
    out = io.StringIO()
    with tracker(run_dir, config(run_dir.path), stream=out) as t:
        for worker in range(W):
            for step in range(1, H + 1):
                where = {"round": 1, "step_in_round": step, "steps_of_round": H, "worker_index": worker, "workers": W}
                t.progress(**where, loss=8.0 - step, tokens_per_s=1.0)
    assert re.findall(r"loss ([0-9.]+)", out.getvalue())[H - 1 :] == ["5.0000"] * (H + 1)


def test_on_a_terminal_there_is_a_bar_that_goes_away(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(console, "DRAW_EVERY_S", 0.0)
    run_dir = RunDir.create(config(tmp_path / "r"))
    out = Terminal()
    with tracker(run_dir, config(run_dir.path), stream=out) as t:
        play(t)
        drawn = out.getvalue()
    assert "round 3/4" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor is visible while the bar is there"
    assert out.getvalue().endswith("\x1b[2K"), "the bar is wiped out at the end"


def test_a_stream_of_few_letters_is_no_obstacle(tmp_path, no_picture):
    run_dir = RunDir.create(config(tmp_path / "r"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with tracker(run_dir, config(run_dir.path), stream=out) as t:
        shown(t, run_dir)
    out.flush()
    assert b"citizens?" in out.buffer.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path, capsys, no_picture):
    read_end, write_end = os.pipe()
    os.close(read_end)
    run_dir = RunDir.create(config(tmp_path / "r"))
    with os.fdopen(write_end, "w") as out, tracker(run_dir, config(run_dir.path), stream=out) as t:
        shown(t, run_dir)
    assert capsys.readouterr().err.count("warning: standard output cannot be written") == 1
    assert RunDir.open(run_dir.path).manifest["state"] == "finished"


def test_quiet_prints_nothing_and_writes_everything(tmp_path, capsys):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        shown(t, run_dir)
    assert capsys.readouterr() == ("", "")
    held = {"run.lock"}  # by this process, which has made the directory
    assert {p.name for p in run_dir.path.iterdir()} == {"run.json", "metrics.jsonl", "overview.png"} | held


def test_numbers_that_are_not_finite_are_told_and_do_not_spoil_the_best(tmp_path, capsys, no_picture):
    run_dir = RunDir.create(config(tmp_path / "r"))
    with tracker(run_dir, config(run_dir.path), quiet=True) as t:
        t.event("nonfinite", round=1, step=2, worker=1, tensor="lm_head.weight")
        t.evaluation(
            round=1, step=5, tokens=9, split="valid", loss=math.nan, perplexity=math.inf, bits_per_byte=None, eval_s=0.0
        )
        play(t, first=2)
        t.finish({}, files=[], sample=None, next_commands=[])
        assert t.figures()["valid_loss_best"] == 2.5
    assert capsys.readouterr().err == "warning: not finite: round 1, step 2, worker 1, tensor lm_head.weight\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1234567, "1.23 M"), (999_600, "1.00 M"), (20e9, "20.0 B"), (3.5, "3.5")],
)
def test_counts_have_three_digits(number, text):
    assert console.count(number) == text
