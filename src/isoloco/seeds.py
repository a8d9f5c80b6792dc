"""Random numbers by name: a stable hash of what identifies them, and a generator keyed by it. No torch at import."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Part = int | float | str | bool | None


def stable_hash(*parts: Part) -> int:
    """A whole number below 2**63 that depends on the parts alone: the same on every machine, in every process.

    Parts of another type differ (1, 1.0, "1" and True are four keys), and so does another grouping of the same letters.
    """
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: Part) -> torch.Generator:
    """A CPU generator keyed by the parts: a draw does not depend on who draws it, where, or what was drawn before.

    torch reads 32 bits of a CPU seed. The rest of the hash chooses one of 1024 places to start from in that stream, so
    that two keys draw the same numbers once in 2**42 pairs, not once in 2**32.
    """
    import torch

    key = stable_hash(*parts)
    keyed = torch.Generator().manual_seed(key & 0xFFFFFFFF)
    torch.rand((key >> 32) % 1024, generator=keyed)
    return keyed
