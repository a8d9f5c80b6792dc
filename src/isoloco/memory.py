"""Out of memory, on any device: one line that names what to lower."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import RunConfig

# how torch on CPU and CUDA, C++ and the system say it; all but the last two come as RuntimeError
_WORDS = re.compile(r"not enough memory|out of memory|bad_alloc|[Cc]annot allocate memory|[Cc]an't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_WORDS.search(str(error))))


@contextmanager
def told_what_to_lower(remedies: str) -> Iterator[None]:
    """Whatever says inside that memory ran out becomes a MemoryError of one line with ``remedies``."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        if not is_out_of_memory(error) or str(error).startswith("out of memory"):  # told already, further in
            raise
        asked = re.search(r"allocate ([\d.,]+ ?[KMGT]?i?B(?:ytes)?\b|\d+ bytes)", str(error), re.IGNORECASE)
        raise MemoryError(f"out of memory{f' (for {asked[1]} more)' if asked else ''}: {remedies}") from error


def remedies(config: RunConfig) -> str:
    """What of a config takes memory and can be lowered, the first to try first."""
    compute = config.compute
    found = []
    if (config.micro_batch_size or 1) > 1:
        found.append(f"lower micro_batch_size (it is {config.micro_batch_size})")
    if not compute.activation_checkpointing:
        found.append("set compute.activation_checkpointing true")
    if config.workers > 1 and not config.is_dp and compute.worker_state != "disk":
        found.append("set compute.worker_state disk")
    found.append(f"lower model.seq_len (it is {config.model.seq_len}), or take a smaller model")
    return "; ".join(found) + " (isoloco plan tells the memory beforehand)"
