"""What a person sees of a preparation that takes longer than two seconds."""

import sys
import time
from types import TracebackType
from typing import Any

QUIET_S = 2.0
LINE_S = 10.0  # between two lines, without a terminal
LIVE_S = 0.2  # on one


class Progress:
    """A live line on a terminal, a line every ten seconds elsewhere; on stderr."""

    def __init__(self, enabled: bool, max_tokens: float | None) -> None:
        self._enabled, self._max_tokens = enabled, max_tokens
        self._next_s = time.monotonic() + QUIET_S
        self._first: tuple[float, int, int] | None = None
        self._live: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tokens(self, documents: int, total_tokens: int, train_tokens: int) -> None:
        """How far tokenizing is; cheap enough for every document."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = (now_s, total_tokens, train_tokens)
            return
        if now_s < self._next_s:
            return
        seconds = max(now_s - self._first[0], 1e-3)
        speed = (total_tokens - self._first[1]) / seconds
        line = f"tokenizing: {documents:,} documents, {total_tokens:,} tokens, {speed:,.0f} tokens/s"
        if self._max_tokens:
            left_s = (self._max_tokens - train_tokens) * seconds / max(train_tokens - self._first[2], 1)
            line += f", {min(train_tokens / self._max_tokens, 1):.0%}, {max(left_s, 0) / 60:,.0f} min left"
        self.show(line)

    def show(self, line: str) -> None:
        """A line, if it is time for one."""
        if not self._enabled or time.monotonic() < self._next_s:
            return
        if sys.stderr.isatty():
            if self._live is None:
                from rich.console import Console
                from rich.status import Status

                self._live = Status(line, console=Console(stderr=True))
                self._live.start()
            self._live.update(line)
        else:
            print(line, file=sys.stderr, flush=True)
        self._next_s = time.monotonic() + (LIVE_S if self._live is not None else LINE_S)
