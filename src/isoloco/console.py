"""What a person sees of a run on standard output: header, live bar or plain lines, evaluations, final table.

Everything goes through one rich console. Without a terminal there are no colours, no control codes and no bar, but a
line every few seconds. Text that comes from a model or from file names is never read as markup, and what the
stream's encoding cannot hold is replaced, so that printing never ends a run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

LINE_EVERY_S = 5.0  # between lines of progress where there is no terminal
DRAW_EVERY_S = 0.1  # between two drawings of the bar where there is one
PLAIN_WIDTH = 120  # columns where there is no terminal to ask


def count(number: float) -> str:
    """1234567 -> '1.23 M': three significant digits with a decimal prefix."""
    for limit, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= limit * 0.9995:
            return f"{_digits(number / limit)}{unit}"
    return f"{number:.0f}" if float(number).is_integer() else _digits(number)


def size(number_bytes: float) -> str:
    """1234567 -> '1.23 MB': bytes with a decimal prefix."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number_bytes) >= limit * 0.9995:
            return f"{_digits(number_bytes / limit)} {unit}"
    return f"{number_bytes:.0f} B"


def duration(seconds: float) -> str:
    """3725 -> '1:02:05'; 9.87 -> '9.9 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _digits(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def printable(text: str) -> str:
    """Text without control characters (but line breaks and tabs): a model may well produce escape codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def relative(path: Path) -> str:
    """A path as one would type it from here: relative where it lies below the current directory."""
    here = Path.cwd()
    whole = Path(path).absolute()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def grouped(sources: dict[str, str]) -> dict[str, list[str]]:
    """Where values came from, turned round: source -> its keys, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for key, source in sources.items():
        groups.setdefault(source, []).append(key)
    return groups


class Screen:
    """The console of one run. ``quiet`` prints nothing on standard output; warnings always go to standard error."""

    def __init__(
        self, *, total_steps: int, total_rounds: int, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        from rich.console import Console

        self.total_steps, self.total_rounds, self.quiet = total_steps, total_rounds, quiet
        self.console = Console(file=stream or sys.stdout, quiet=quiet, highlight=False, emoji=False, markup=False)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self._bar: Any = None
        self._task: Any = None
        self._first: tuple[float, float] | None = None  # time and fraction done at the first call: the base of the ETA
        self._drawn = time.monotonic()

    def line(self, text: str, *, style: str = "") -> None:
        """One line, never wrapped; above the bar where there is one."""
        self.console.print(self._fit(text), style=style or None, soft_wrap=True)

    def warn(self, text: str) -> None:
        """One line on standard error."""
        self.pause()
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)

    def header(self, title: str, rows: list[tuple[str, str]], sources: list[tuple[str, str]]) -> None:
        """A panel of label and value rows, then where every value that is not a default came from."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[Any] = [self._grid(rows)]
        if sources:
            parts += [Text(), Text("Not defaults", style="bold"), self._grid(sources)]
        self.console.print(
            Panel(Group(*parts), title=Text(self._fit(title), style="bold"), title_align="left", expand=False)
        )

    def progress(self, *, fraction: float, round: int, detail: str) -> None:
        """Bar, or a line every few seconds; ``fraction`` is the part of the budget that is done."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, fraction)
        if self.quiet or now - self._drawn < (DRAW_EVERY_S if self.console.is_terminal else LINE_EVERY_S):
            return
        self._drawn = now
        start, before = self._first
        gained = fraction - before
        left = f"ETA {duration((now - start) / gained * (1 - fraction))}" if gained > 0 else "ETA -"
        text = f"round {round}/{self.total_rounds}  {detail}  {left}"
        if not self.console.is_terminal:
            self.line(f"{fraction:4.0%}  {text}")
            return
        if self._bar is None:
            self._start_bar()
        self._bar.update(self._task, completed=fraction, text=text)
        self._bar.refresh()

    def _start_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (TaskProgressColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False))
        # drawn by our own calls, by no thread; output of others is passed on above it
        self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=1.0, text="")
        self._bar.start()
        self.console.show_cursor(True)  # a process that is killed must not leave a terminal without a cursor

    def pause(self) -> None:
        """Take the bar away; the next progress draws it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Label and value rows with a rule under the title."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        self.pause()
        table = Table(
            title=Text(self._fit(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_header=False
        )
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold", style="bold")
        for label, value in rows:
            table.add_row(Text(self._fit(label)), Text(self._fit(value)))
        self.console.print(table)

    def listing(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Rows that must stay whole to be copied: paths and commands are never wrapped."""
        if rows:
            width = max(len(label) for label, _ in rows)
            self.line(title, style="bold")
            for label, value in rows:
                self.line(f"  {label:{width}}  {value}" if width else f"  {value}")

    def _grid(self, rows: list[tuple[str, str]]) -> Any:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(self._fit(label)), Text(self._fit(value)))
        return grid

    def _fit(self, text: str) -> str:
        encoding = self.console.encoding or "utf-8"
        return printable(text).encode(encoding, "replace").decode(encoding)
