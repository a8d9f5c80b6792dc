"""What a person sees of a preparation that takes longer than two seconds."""

import sys
import time
from types import TracebackType
from typing import Any

QUIET_S = 2.0
LINE_S = 10.0  # without a terminal


class Progress:
    """A live line on a terminal, a line every ten seconds elsewhere; on stderr."""

    def __init__(self, enabled: bool, max_tokens: float | None) -> None:
        self._enabled, self._max_tokens = enabled, max_tokens
        self._started_s = self._said_s = time.monotonic()
        self._phase = "preparing"
        self._first_tokens: int | None = None
        self._live: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str) -> None:
        """What is being done from now on."""
        self._phase = name

    def update(self, documents: int, tokens: dict[str, int]) -> None:
        """How far it is; cheap enough for every document."""
        now_s = time.monotonic()
        total = sum(tokens.values())
        if self._first_tokens is None:
            self._first_tokens, self._started_s = total, now_s
        if not self._enabled or now_s - self._started_s < QUIET_S or now_s - self._said_s < (0.2 if self._live else 0):
            return
        speed = (total - self._first_tokens) / (now_s - self._started_s)
        line = f"{self._phase}: {documents:,} documents, {total:,} tokens, {speed:,.0f} tokens/s"
        if self._max_tokens:
            left_s = (self._max_tokens - tokens["train"]) / max(speed, 1)
            line += f", {tokens['train'] / self._max_tokens:.0%}, {left_s / 60:,.0f} min left"
        if sys.stderr.isatty():
            self._show(line)
        elif now_s - self._said_s >= LINE_S:
            print(line, file=sys.stderr, flush=True)
            self._said_s = now_s

    def _show(self, line: str) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.status import Status

            self._live = Status(line, console=Console(stderr=True))
            self._live.start()
        self._live.update(line)
        self._said_s = time.monotonic()
