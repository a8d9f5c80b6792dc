"""Faults that several tests make."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def requeue_at(call: int) -> Callable[[], str]:
    """A stop that asks to be requeued at its n-th question, and from then on."""
    asked = itertools.count(1)
    return lambda: "requeue" if next(asked) >= call else ""


@contextmanager
def no_file_larger_than(limit_bytes: int) -> Iterator[None]:
    """The system refuses to write more than this to any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
