"""Studies: runs that are done once, whoever does them, and what is told of them."""

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import isoloco.study as studies
from isoloco.climb import best_point
from isoloco.study import run_study
from isoloco.study_board import Board, Run
from isoloco.study_claims import read_card, take
from isoloco.study_view import panel, status

# with runs that only say what came out


@pytest.fixture
def pretend(monkeypatch):
    """Runs end at once with what a function of their options says: a loss, None for a failure, or a state."""

    def pretend(outcome: Callable[[dict[str, Any]], float | str | None]) -> list[Run]:
        started: list[Run] = []

        class Ended:
            """Stands for a process: what it would have written is there at once."""

            def __init__(self, argv: list[str], *, stdout: Any, **options: Any) -> None:
                run = started[-1]
                given = dict(word.removeprefix("--").split("=", 1) for word in argv if word.startswith("--"))
                assert given.keys() == run.options.keys() | {"out_dir", "compute.threads"}
                stdout.write(b"one line\nisoloco: it broke\n")
                found = outcome(run.options)
                state = found if isinstance(found, str) else "failed" if found is None else "finished"
                summary = (
                    {"valid_loss_last": found, "valid_loss_best": found, "tokens": 64} if state == "finished" else {}
                )
                directory = Path(given["out_dir"])
                directory.mkdir(parents=True)
                (directory / "run.json").write_text(
                    json.dumps({"state": state, "summary": summary, "identity": "x"}).replace("NaN", "null")
                )
                self.pid = os.getpid()
                self.returncode = 0 if state == "finished" else 2

            def poll(self) -> int:
                return self.returncode

            def wait(self) -> int:
                return self.returncode

        start = real_start

        def starting(board: Board, run: Run, *rest: Any) -> Any:
            started.append(run)
            return start(board, run, *rest)

        monkeypatch.setattr(studies, "_start", starting)
        monkeypatch.setattr(studies.subprocess, "Popen", Ended)
        monkeypatch.setattr(studies.time, "sleep", lambda seconds: None)
        return started

    real_start = studies._start
    return pretend


TUNED = """
seeds: [1, 2, 3]
trials: 7
options: {sync_every: 2}
cells:
  plain: {method: diloco_sgd}
  tuned:
    method: isoloco
    tune: {outer.lr: {start: 1.0, factor: 2}, outer.momentum: {start: 0.8, step: 0.1, low: 0.0, high: 0.95}}
"""


def loss_of(options: dict[str, Any]) -> float:
    lr, momentum = options.get("outer.lr", 1.0), options.get("outer.momentum", 0.0)
    return abs(math.log2(lr) - 1) + abs(momentum - 0.8) + options["seed"] / 100


def test_a_study_runs_trials_then_the_best_for_every_seed_and_nothing_twice(study, pretend, tmp_path):
    board, started = study(TUNED), pretend(loss_of)
    said: list[str] = []
    rows_csv = tmp_path / "rows" / "rows.csv"
    assert run_study(board, jobs=2, say=said.append, rows=rows_csv)
    assert len({run.key for run in started}) == len(started)
    kinds = [(run.cell, run.kind) for run in started]
    # the best trial is the first seed's report: it is not run again
    assert kinds.count(("plain", "report")) == 3
    assert kinds.count(("tuned", "trial")) == 7
    assert kinds.count(("tuned", "report")) == 2
    reports = [run for run in started if run.kind == "report" and run.cell == "tuned"]
    assert {run.seed for run in reports} == {2, 3}
    assert all((run.options["outer.lr"], run.options["outer.momentum"]) == (2.0, 0.8) for run in reports)
    assert all(run.options["sync_every"] == 2 for run in started)

    again = pretend(loss_of)
    assert run_study(board, say=said.append)
    assert again == []

    with rows_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 7 + 3
    assert {row["optimum"] for row in rows if row["cell"] == "plain"} == {"given"}
    assert {row["optimum"] for row in rows if row["cell"] == "tuned"} == {"inside"}
    best = [row for row in rows if row["cell"] == "tuned" and row["kind"] == "report"]
    assert [float(row["valid_loss_last"]) for row in best] == pytest.approx([0.01, 0.02, 0.03])
    assert json.loads(best[0]["options"])["outer.lr"] == 2.0


def test_an_optimum_at_the_edge_is_marked(study, pretend):
    board = study(TUNED.replace("trials: 7", "trials: 3"))
    pretend(loss_of)
    assert run_study(board, say=lambda text: None)
    assert {row["optimum"] for row in board.rows() if row["cell"] == "tuned"} == {"edge"}


def test_a_grid_is_run_whole_for_every_seed(study, pretend):
    board, started = (
        study("seeds: [1, 2]\ncells: {a: {method: diloco, grid: {sync_every: [2, 4], workers: [2, 4]}}}"),
        [],
    )
    started = pretend(loss_of)
    assert run_study(board, say=lambda text: None)
    assert sorted((r.options["sync_every"], r.options["workers"], r.seed) for r in started) == [
        (h, w, s) for h in (2, 4) for w in (2, 4) for s in (1, 2)
    ]


def test_a_run_that_fails_is_tried_twice_and_told(study, pretend):
    board = study(TUNED)
    started = pretend(lambda o: None if o["method"] == "diloco_sgd" and o["seed"] == 2 else loss_of(o))
    said: list[str] = []
    assert not run_study(board, say=said.append)
    failing = [run for run in started if run.cell == "plain" and run.seed == 2]
    assert len(failing) == 2
    assert sum("failed (isoloco: it broke)" in line for line in said) == 2
    assert len(board.set_aside(failing[0], "failed")) == 2
    assert len(started) == 3 + 7 + 2 + 1
    row = next(r for r in board.rows() if r["cell"] == "plain" and r["seed"] == 2)
    assert row["valid_loss_last"] is None
    assert not run_study(board, say=said.append)  # and not a third time
    assert len([run for run in started if run.cell == "plain" and run.seed == 2]) == 2


def test_a_trial_that_diverges_is_no_failure(study, pretend):
    board = study(TUNED)
    pretend(lambda o: math.nan if o.get("outer.lr", 1.0) > 2 else loss_of(o))
    assert run_study(board, say=lambda text: None)
    trials = board.trials(board.study.cells[1])
    assert trials[2, 0] == math.inf
    assert best_point(trials) == (1, 0)
    assert trials[1, 0] == pytest.approx(0.01)


def interrupted(options: dict[str, Any]) -> float:
    raise KeyboardInterrupt


def test_interruptions_are_not_failures(study, pretend):
    """Stopped however often: what was left is moved away, and the run is run."""
    board = study("seeds: [1]\ncells: {a: {method: diloco}}")
    [run] = board.wanted(board.study.cells[0])
    left = ["running", "stopped", "running"]
    for state in left:  # by processes that died with their study
        board.directory(run).mkdir(parents=True)
        (board.directory(run) / "run.json").write_text(json.dumps({"state": state, "summary": {}}))
        assert board.loss(run) is None
        pretend(interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_study(board, say=lambda text: None)
    outcomes = iter(["stopped", "stopped", "stopped", 1.5])
    started = pretend(lambda options: next(outcomes))
    assert run_study(board, say=lambda text: None)
    assert len(started) == 4
    assert board.loss(run) == 1.5
    assert len(board.set_aside(run, "interrupted")) == 6
    assert board.set_aside(run, "failed") == []


def test_a_run_is_claimed_by_one_process_at_a_time(study, pretend):
    board = study("seeds: [1, 2]\ncells: {a: {method: diloco}}")
    first, second = board.wanted(board.study.cells[0])
    lock = take(board.root, first.key)
    assert lock is not None
    assert take(board.root, first.key) is None
    started = pretend(lambda options: 1.0)

    class Released(Exception):
        pass

    def say(text: str) -> None:
        if "seed 2: valid_loss_last" in text:
            raise Released

    with pytest.raises(Released):
        run_study(board, say=say)
    assert started == [second]
    lock.release()
    assert run_study(board, say=lambda text: None)
    assert started == [second, first]


# how it stands


def test_status_tells_what_is_done_runs_and_failed_and_what_to_do(study, pretend):
    board = study(TUNED)
    lines = status(board, "the command")
    assert lines[0] == "0 of 12 runs done, 0 running, 0 failed"  # 3, and 7 trials of which the best is one of 3
    assert lines[-1] == "the rest: the command"
    pretend(lambda o: None if o["method"] == "diloco_sgd" and o["seed"] == 2 else loss_of(o))
    assert not run_study(board, say=lambda text: None)
    lines = status(board, "the command")
    assert lines[0].startswith("11 of 12 runs done, 0 running, 1 failed")
    assert any(line.endswith("failed: isoloco: it broke") for line in lines)
    assert any(line.startswith("tuned") and "best 0.0100" in line for line in lines)
    assert lines[-1] == "mend what failed, then try it again: the command --retry"
    assert board.forgive() == 2
    pretend(loss_of)
    assert run_study(board, say=lambda text: None)
    assert status(board, "the command")[0].startswith("12 of 12 runs done, 0 running, 0 failed")


def test_the_live_view_draws_without_a_run_and_with_all(study, pretend):
    from rich.console import Console

    board = study(TUNED)
    for done in (False, True):
        if done:
            pretend(loss_of)
            assert run_study(board, say=lambda text: None)
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(panel(board, ["a run [begins]"]))
        text = console.export_text()
        assert ("12 of 12 runs done" in text) == done
        assert "a run [begins]" in text


def test_a_claim_says_who_and_an_old_one_is_taken_over(study):
    board = study("seeds: [1]\ncells: {a: {method: diloco}}")
    [run] = board.wanted(board.study.cells[0])
    path = board.root / "claims" / f"{run.key}.json"
    claim = take(board.root, run.key)
    assert claim is not None
    assert read_card(path)["study_pid"] == os.getpid()
    assert "running: process" in "\n".join(status(board, "x"))
    claim.release()
    assert not path.exists()
    for age, free in ((1.0, False), (600.0, True)):  # of another host, whose processes cannot be looked for
        card = {"host": "elsewhere", "study_pid": 1, "heartbeat_s": time.time() - age}
        path.write_text(json.dumps(card))
        claim = take(board.root, run.key)
        assert (claim is not None) == free
        if claim:
            claim.release()


def test_threads_are_the_recipes_or_else_a_share_of_the_machines(study, pretend, monkeypatch):
    board = study("seeds: [1]\ncells: {a: {method: diloco}, b: {method: diloco, compute.threads: 3}}")
    monkeypatch.setattr(studies.os, "cpu_count", lambda: 8)
    pretend(lambda options: 1.0)
    given: list[tuple[str, str]] = []
    process = studies.subprocess.Popen

    def starting(argv: list[str], *, env: dict[str, str], **options: Any) -> Any:
        given.append((next(w for w in argv if w.startswith("--compute.threads=")), env["OMP_NUM_THREADS"]))
        return process(argv, env=env, **options)

    monkeypatch.setattr(studies.subprocess, "Popen", starting)
    assert run_study(board, jobs=2, say=lambda text: None)
    assert sorted(given) == [("--compute.threads=3", "3"), ("--compute.threads=4", "4")]


def test_each_run_has_devices_of_its_own(study, pretend, monkeypatch):
    board = study("seeds: [1, 2, 3, 4]\ncells: {a: {method: diloco}}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    with pytest.raises(ValueError, match="takes 4 GPUs, found 3: lower one"):
        run_study(board, jobs=2, devices_per_run=2, say=lambda text: None)
    pretend(lambda options: 1.0)
    given: list[str] = []
    process = studies.subprocess.Popen

    def starting(argv: list[str], *, env: dict[str, str], **options: Any) -> Any:
        given.append(env["CUDA_VISIBLE_DEVICES"])
        return process(argv, env=env, **options)

    monkeypatch.setattr(studies.subprocess, "Popen", starting)
    assert run_study(board, jobs=3, devices_per_run=1, say=lambda text: None)
    assert sorted(given[:3]) == ["3", "5", "7"]
    assert len(given) == 4


# real runs


@pytest.mark.slow
def test_a_study_of_real_runs(study, shards, tmp_path):
    """Subprocesses, a search, a run that fails, and the table; done runs are not done again."""
    from tiny_models import config_file

    Path("small.yaml").write_text(
        f"workers: 2\nglobal_batch_size: 4\nsync_every: 2\nbudget: {{steps: 4}}\ndata: {{path: {shards}}}\n"
        f"model: {{config: {config_file('llama', tmp_path)}, seq_len: 16}}\neval: {{tokens: 160}}\n"
    )
    board = study(
        "seeds: [1]\ntrials: 2\ncells:\n"
        "  tuned: {method: isoloco, inner.lr: 1e-2, tune: {outer.lr: [1.8, 1.0]}}\n"
        "  broken: {method: diloco, inner.lr: 1e+39}\n"
    )
    said: list[str] = []
    assert not run_study(board, jobs=2, threads=1, say=said.append, rows=tmp_path / "rows.csv")
    assert sum("no worker is left" in line for line in said) == 2
    tuned = [row for row in board.rows() if row["cell"] == "tuned"]
    assert [row["kind"] for row in tuned] == ["trial", "trial", "report"]
    assert all(0 < row["valid_loss_last"] < math.log(300) + 1 for row in tuned)
    assert {row["optimum"] for row in tuned} == {"inside"}
    assert all(len(row["identity"]) == 16 for row in tuned)
    assert len({row["run"] for row in tuned}) == 2  # the best trial is the first seed's report
    before = {p: p.stat().st_mtime_ns for p in board.root.rglob("run.json")}
    assert not run_study(board, jobs=2, threads=1, say=said.append)
    assert {p: p.stat().st_mtime_ns for p in board.root.rglob("run.json")} == before
