"""Studies: the search for the best options, and runs that are done once, whoever does them."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

import isoloco.study as studies
from isoloco.climb import Axis, Point, best_point, climb, inside
from isoloco.recipe import packaged
from isoloco.study import run_study
from isoloco.study_board import Board, Run
from isoloco.study_claims import read_card, take
from isoloco.study_file import load, scales
from isoloco.study_view import panel, status

LR = Axis("inner.lr", start=1e-3, factor=2.0)
MOMENTUM = Axis("outer.momentum", start=0.8, step=0.1, low=0.0, high=0.95)

# ladders


def test_ladders_multiply_add_or_list():
    assert [LR.value(k) for k in (-2, 0, 3)] == [0.00025, 0.001, 0.008]
    assert [MOMENTUM.value(k) for k in (-9, -8, 0, 1, 2)] == [None, 0.0, 0.8, 0.9, None]
    listed = Axis("outer.lr", values=(0.7, 1.0, 1.8))
    assert [listed.value(k) for k in (-1, 0, 2, 3)] == [None, 0.7, 1.8, None]
    assert Axis("inner.lr", start=2.8e-3, factor=math.sqrt(2)).value(1) == 0.00396  # three digits, the same everywhere


# the search


def search(axes: tuple[Axis, ...], loss: Callable[[Point], float], trials: int) -> dict[Point, float]:
    """Follow the search to its end; every step of it keeps the laws."""
    losses: dict[Point, float] = {}
    while todo := climb(axes, losses, trials):
        assert len(set(todo)) == len(todo)
        assert not set(todo) & losses.keys()
        assert len(losses) + len(todo) <= max(trials, 1)
        assert all(axis.value(k) is not None for point in todo for axis, k in zip(axes, point, strict=True))
        losses |= {point: loss(point) for point in todo}
    return losses


def bowl(centre: Point, tilt: float = 0.0) -> Callable[[Point], float]:
    return lambda p: sum((a - c) ** 2 * (1 + i) for i, (a, c) in enumerate(zip(p, centre, strict=True))) + tilt * p[0]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=3), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_search_keeps_its_laws_and_uses_all_its_trials(centre, trials):
    axes = tuple(Axis(f"a{i}", start=1.0, factor=2.0) for i in range(len(centre)))
    losses = search(axes, bowl(tuple(centre)), trials)
    assert len(losses) == trials  # the same number for every cell: no method gets more chances
    assert (0,) * len(axes) in losses
    if inside(axes, losses):
        assert best_point(losses) == tuple(centre)  # of a bowl, the only point that is inside


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_with_trials_enough_the_optimum_is_found_and_inside(centre):
    axes = tuple(Axis(f"a{i}", start=1.0, factor=2.0) for i in range(len(centre)))
    losses = search(axes, bowl(tuple(centre)), 6 * sum(map(abs, centre)) + 6 * len(centre) + 1)
    assert best_point(losses) == tuple(centre)
    assert inside(axes, losses)


def test_a_bounded_ladder_is_left_nowhere_and_its_end_counts_as_inside():
    losses = search((MOMENTUM,), bowl((5,)), 10)  # the best lies beyond the last rung
    assert best_point(losses) == (1,)
    assert inside((MOMENTUM,), losses)
    assert len(losses) == 10  # from 0.0 to 0.9
    assert search((MOMENTUM,), bowl((0,)), 50).keys() == {(k,) for k in range(-8, 2)}  # no more than there are


def test_too_few_trials_leave_the_optimum_at_an_edge():
    losses = search((LR,), bowl((9,)), 4)
    assert len(losses) == 4
    assert not inside((LR,), losses)


def test_what_is_not_finite_never_wins():
    losses: dict[Point, float] = {(0,): math.nan, (1,): math.inf, (-1,): 7.0, (2,): -math.inf}
    del losses[(2,)]
    assert best_point(losses) == (-1,)
    assert best_point({(0,): 1.0, (-1,): 1.0}) == (-1,)
    diverging = search((LR,), lambda p: math.inf if p[0] > 1 else -p[0], 8)
    assert best_point(diverging) == (1,)
    assert inside((LR,), diverging)


def test_nothing_to_tune_is_nothing_to_search():
    assert climb((), {}, 10) == []


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_search_goes_on_the_same_from_any_part_of_it(data):
    axes = (LR, MOMENTUM)
    loss = bowl((2, -1), tilt=0.1)
    whole = search(axes, loss, 12)
    known = {p: v for p, v in whole.items() if data.draw(st.booleans())}
    again: dict[Point, float] = {}
    while todo := climb(axes, again, 12):
        again |= {p: known.get(p, loss(p)) for p in todo}
    assert again == whole


# studies on disk, with runs that only say what came out


RECIPE = "method: isoloco\nworkers: 2\nglobal_batch_size: 8\nbudget: {steps: 4}\n"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Make a board of a study from YAML text over a small recipe."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)

    def make(text: str) -> Board:
        Path("try.yaml").write_text(f"name: try\nrecipe: small.yaml\n{text}")
        return Board(load("try.yaml"), tmp_path / "studies")

    return make


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


# study files


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
