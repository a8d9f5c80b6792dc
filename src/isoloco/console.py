"""What a person sees of a run on standard output: header, live bar or plain lines, evaluations, final table.

Everything goes through one rich console. Without a terminal there are no colours, no control codes and no bar, but a
line every few seconds. Text that comes from a model or from file names is never read as markup, what the stream's
encoding cannot hold is replaced, and a stream that takes nothing any more is given up: printing never ends a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any, TextIO

LINE_EVERY_S = 5.0  # between lines of progress where there is no terminal
DRAW_EVERY_S = 0.1  # between two drawings of the bar where there is one
PLAIN_WIDTH = 120  # columns where there is no terminal to ask


def count(number: float) -> str:
    """1234567 -> '1.23 M': three significant digits with a decimal prefix."""
    return _prefixed(number, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}) or f"{number:.3g}"


def size(number_bytes: float) -> str:
    """1234567 -> '1.23 MB': bytes with a decimal prefix."""
    return _prefixed(number_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}) or f"{number_bytes:.0f} B"


def _prefixed(number: float, units: dict[str, float]) -> str:
    for unit, worth in units.items():
        if abs(number) >= worth * 0.9995:
            value = number / worth
            return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f} {unit}"
    return ""


def duration(seconds: float) -> str:
    """9.87 -> '9.9 s'; 125 -> '2:05'; 3725 -> '1:02:05'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """Text without control characters, but line breaks and tabs: a model may well produce a terminal's escape codes."""
    keep = "\n\t\u200c\u200d"  # the last two join letters in some scripts
    return "".join(c if c in keep or unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)


def relative(path: Path) -> str:
    """A path as one would type it from here: relative where it lies below the current directory."""
    here, whole = Path.cwd(), Path(path).absolute()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def grouped(sources: dict[str, str]) -> dict[str, list[str]]:
    """Where values came from, turned round: source -> its keys, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for key, source in sources.items():
        groups.setdefault(source, []).append(key)
    return groups


class Screen:
    """The console of one run. ``quiet`` prints nothing on standard output; warnings always go to standard error."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.console = Console(file=stream or sys.stdout, quiet=quiet, highlight=False, emoji=False, markup=False)
        self.console.on_broken_pipe = self._lost  # type: ignore[method-assign] (rich would end the process)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self._bar: Any = None
        self._task: Any = None
        self._first: tuple[float, float] | None = None  # when, and what was done, at the first call: base of the ETA
        self._drawn = time.monotonic()

    def line(self, text: str, *, style: str = "", mark: str = "") -> None:
        """One line, never wrapped, above the bar where there is one; ``mark`` is set off at its end."""
        from rich.text import Text

        parts = (self._fit(text), style), *([(f"  {mark}", "bold green")] if mark else [])
        self._print(Text.assemble(*parts), soft_wrap=True)

    def warn(self, text: str) -> None:
        """One line on standard error."""
        self.pause()
        with contextlib.suppress(OSError):  # where standard error is gone too there is nobody left to tell
            print("warning: " + printable(text).replace("\n", " "), file=sys.stderr, flush=True)

    def header(self, title: str, rows: list[tuple[str, str]], sources: list[tuple[str, str]]) -> None:
        """A panel of label and value rows, then where the values that are not defaults came from."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[Any] = [self._grid(rows)]
        if sources:
            parts += [Text(), Text("Not defaults", style="bold"), self._grid(sources)]
        name = Text(self._fit(title), style="bold")
        self._print(Panel(Group(*parts), title=name, title_align="left", expand=False, border_style="dim"))

    def progress(self, text: str, *, fraction: float) -> None:
        """The bar, or a line every few seconds; ``fraction`` of the run is done, and the rest is estimated from it."""
        now = time.monotonic()
        self._first = self._first or (now, fraction)
        every_s = DRAW_EVERY_S if self.console.is_terminal else LINE_EVERY_S
        if self.console.quiet or now - self._drawn < every_s:
            return
        self._drawn = now
        start, before = self._first
        gained = fraction - before
        text += f"  ETA {duration((now - start) / gained * (1 - fraction)) if gained > 0 else '-'}"
        if self.console.is_terminal:
            self._draw(text, fraction)
        else:
            self.line(f"{fraction:4.0%}  {text}")

    def _draw(self, text: str, fraction: float) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        try:
            if self._bar is None:
                columns = (TaskProgressColumn(), BarColumn(20), TextColumn("{task.fields[text]}", markup=False))
                # drawn by our own calls and no thread; what others print is passed on above it
                self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
                self._task = self._bar.add_task("", total=1.0, text="")
                self._bar.start()
                self.console.show_cursor(True)  # a killed process must not leave a terminal without a cursor
            self._bar.update(self._task, completed=fraction, text=text)
            self._bar.refresh()
        except OSError as error:
            self._lost(error)

    def pause(self) -> None:
        """Take the bar away; the next progress draws it again."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with contextlib.suppress(OSError):
                bar.stop()

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Label and value rows under a title."""
        from rich.text import Text

        self.pause()
        self._print(Text("\n" + self._fit(title), style="bold"))
        self._print(self._grid(rows, indent=2))

    def listing(self, title: str, rows: list[tuple[str, str]]) -> None:
        """A blank line, a title, and rows that must stay whole to be copied: paths and commands are never wrapped."""
        if rows:
            width = max(len(label) for label, _ in rows)
            self.line(f"\n{title}", style="bold")
            for label, value in rows:
                self.line(f"  {label:{width}}  {value}" if width else f"  {value}")

    def _grid(self, rows: list[tuple[str, str]], *, indent: int = 0) -> Any:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(self._fit(label)), Text(self._fit(value)))
        return Padding(grid, (0, 0, 0, indent), expand=False)

    def _print(self, what: Any, **options: Any) -> None:
        try:
            self.console.print(what, **options)
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError | None = None) -> None:
        self.console.quiet = True
        with contextlib.suppress(OSError, ValueError):  # so that the interpreter's own last flush has somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.file.fileno())
        told = error.strerror if error else "nobody reads it"
        self.warn(f"standard output cannot be written ({told}): the run goes on and shows nothing more")

    def _fit(self, text: str) -> str:
        encoding = self.console.encoding or "utf-8"
        return printable(text).encode(encoding, "replace").decode(encoding)
