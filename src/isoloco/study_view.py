"""How a study stands: what is done, running, failed and left, in a terminal and in a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from . import console
from .study_board import WHY, Board, Run
from .study_claims import is_alive, read_card


@dataclass(frozen=True)
class Standing:
    """A cell: how many runs it has and how many are done, the claims on others, those that failed and why."""

    cell: str
    done: int
    expected: int
    running: list[tuple[Run, dict[str, Any]]]
    failed: list[tuple[Run, str]]
    best: float | None
    seconds: list[float]


def standings(board: Board) -> list[Standing]:
    """One for each cell."""
    cards = {path.stem: read_card(path) for path in (board.root / "claims").glob("*.json")}
    named: dict[str, dict[str, tuple[Run, float | None]]] = {cell.name: {} for cell in board.study.cells}
    for cell, run, loss in board.everything():
        named[cell.name][run.key] = (run, loss)  # the best trial is the first seed's report too
    found = []
    for cell in board.study.cells:
        runs = {key: run for key, (run, _) in named[cell.name].items()}
        losses = {key: loss for key, (_, loss) in named[cell.name].items()}
        failed = [(run, why(board, run)) for run in runs.values() if board.failed(run)]
        done = [loss for key, loss in losses.items() if loss is not None and not board.failed(runs[key])]
        finite = [loss for loss in done if loss < float("inf")]
        running = [(run, cards[key]) for key, run in runs.items() if losses[key] is None and cards.get(key)]
        seconds = [(board.manifest(run).get("summary") or {}).get("wall_s") for run in runs.values()]
        took = [s for s in seconds if s]
        best = min(finite, default=None)
        found.append(Standing(cell.name, len(done), board.expected(cell), running, failed, best, took))
    return found


def why(board: Board, run: Run) -> str:
    """The one line with which the last attempt at a run failed."""
    line = board.set_aside(run, "failed")[-1] / WHY
    if line.is_file():
        return line.read_text("utf-8").strip()
    log = board.log(run)
    said = log.read_text("utf-8", "replace").strip().splitlines() if log.is_file() else []
    return said[-1] if said else "no line was kept"


def left_s(found: list[Standing]) -> float | None:
    """Seconds until all is done, with as many runs at a time as now; None before the first has ended."""
    took = [s for cell in found for s in cell.seconds]
    left = sum(cell.expected - cell.done - len(cell.failed) for cell in found)
    at_once = sum(is_alive(card) for cell in found for _, card in cell.running)
    return left * sum(took) / len(took) / max(at_once, 1) if took else None


def headline(found: list[Standing]) -> str:
    """One line of totals."""
    running = sum(is_alive(card) for cell in found for _, card in cell.running)
    line = f"{sum(c.done for c in found)} of {sum(c.expected for c in found)} runs done, {running} running"
    line += f", {sum(len(c.failed) for c in found)} failed"
    seconds = left_s(found)
    return line + (f", about {console.duration(seconds)} left" if seconds else "")


def status(board: Board, command: str) -> list[str]:
    """Lines for people: each cell, each claim, each failure and what to do. ``command``: how this study is run."""
    found = standings(board)
    lines = [headline(found), ""]
    width = max(len(cell.cell) for cell in found)
    for cell in found:
        best = f"best {cell.best:.4f}" if cell.best is not None else ""
        lines.append(f"{cell.cell:<{width}}  {cell.done} of {cell.expected} done  {best}".rstrip())
        for run, card in cell.running:
            who = f"process {card.get('pid', card['study_pid'])} on {card['host']}"
            age = console.duration(max(time.time() - card["heartbeat_s"], 0.0))
            state = f"running: {who}, heartbeat {age} ago" if is_alive(card) else f"left by {who}, which is gone"
            lines.append(f"  {run.kind} seed {run.seed} {run.key} {state}")
        for run, line in cell.failed:
            lines.append(f"  {run.kind} seed {run.seed} {run.key} failed: {line}")
            lines.append(f"    all it said: {console.relative(board.log(run))}")
    if any(not is_alive(card) for cell in found for _, card in cell.running):
        lines += ["", f"what dead processes left is taken up again by: {command}"]
    if any(cell.failed for cell in found):
        lines += ["", f"mend what failed, then try it again: {command} --retry"]
    elif any(cell.done < cell.expected for cell in found):
        lines += ["", f"the rest: {command}"]
    return lines


def panel(board: Board, said: list[str]) -> Any:
    """The live view: a table of the cells and the last lines that were said."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = standings(board)
    table = Table(title=Text(board.study.title), caption=headline(found), expand=False)
    for name in ("cell", "done", "running", "failed", "best"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for cell in found:
        running = sum(is_alive(card) for _, card in cell.running)
        best = f"{cell.best:.4f}" if cell.best is not None else ""
        row = (
            Text(cell.cell),
            f"{cell.done} of {cell.expected}",
            str(running or ""),
            str(len(cell.failed) or ""),
            best,
        )
        table.add_row(*row, style="red" if cell.failed else "green" if cell.done == cell.expected else None)
    return Group(table, *map(Text, said[-5:]))  # names are no markup
