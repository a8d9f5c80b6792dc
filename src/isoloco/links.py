"""What a link between the workers costs: bytes and seconds of a round, and how long a round has to be.

Each worker is taken as a process of its own (or an island whose members share its link), and a link as carrying both
ways at once. Owner computes: a process sends N (P - 1) / P coded elements to the owners and as many float32 ones of the
anchor it owns to all; data-parallel training averages N gradients in a ring, 2 N (P - 1) / P elements each way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .codec import WIRE_BYTES
from .config import RunConfig
from .plan import Plan

PAYLOAD = 1448 / 1514  # of an Ethernet frame, less the headers of IP and TCP
SMALL_SHARE = 0.05  # of the time for communication, that few will mind
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Link:
    """Bits per second each way, seconds one way, and how many tokens a second all workers compute together."""

    bandwidth_bits: float
    latency_s: float
    tokens_per_s: float

    def seconds(self, sent_bytes: float, messages: int) -> float:
        return sent_bytes * 8 / (self.bandwidth_bits * PAYLOAD) + messages * self.latency_s


@dataclass(frozen=True)
class Cost:
    """Of one way to train: bytes that a process sends per round of H steps, seconds of the round, what takes them."""

    name: str
    sent_bytes: float
    compute_s: float
    talk_s: float

    @property
    def share(self) -> float:
        """Of the time that goes into communication."""
        return self.talk_s / (self.compute_s + self.talk_s)


def link_flags(argv: list[str]) -> tuple[list[str], Link | None]:
    """--bandwidth, --latency and --tokens-per-second, taken out of the arguments of `isoloco plan`.

    Raises:
        ValueError: a number that cannot be read; a latency or speed without a bandwidth, and the other way about.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    queue = list(argv)
    while queue:
        key, equals, value = queue.pop(0).partition("=")
        if key in ("--bandwidth", "--latency", "--tokens-per-second"):
            found[key] = value if equals else (queue.pop(0) if queue else "")
        else:
            rest.append(key + equals + value)
    if not found:
        return rest, None
    if not {"--bandwidth", "--tokens-per-second"} <= found.keys():
        raise ValueError("a link takes --bandwidth (100Mbit) and --tokens-per-second (what all workers compute), both")
    return rest, Link(
        _quantity("--bandwidth", found["--bandwidth"], UNITS),
        _quantity("--latency", found.get("--latency", "0ms"), {"ms": 1e-3, "us": 1e-6, "s": 1.0}),
        _quantity("--tokens-per-second", found["--tokens-per-second"], {"": 1.0, "k": 1e3, "m": 1e6}),
    )


def _quantity(key: str, text: str, units: dict[str, float]) -> float:
    parts = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*?)(?:/s)?", text.strip().lower())
    if (
        parts is None
        or parts[2] not in units
        or not _is_number(parts[1])
        or (key != "--latency" and not float(parts[1]))
    ):
        raise ValueError(f"{key}: got {text!r}, takes a number and one of {', '.join(filter(None, units))}")
    return float(parts[1]) * units[parts[2]]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def costs(config: RunConfig, plan: Plan, link: Link) -> list[Cost]:
    """Data-parallel training and this config's rounds with each codec, over H steps."""
    workers, steps = config.workers, config.sync_every
    elements = plan.trainable * (workers - 1) / workers
    compute_s = steps * config.global_batch_size * config.model.seq_len / link.tokens_per_s
    ring = 2 * (workers - 1)
    sent = 2 * 4 * elements
    found = [Cost("dp", steps * sent, compute_s, steps * link.seconds(sent, ring))]
    if config.is_dp:
        return found
    for wire, width in WIRE_BYTES.items():
        sent = elements * (width + 4)
        # four short meetings, and two exchanges, each of which waits for an answer
        found.append(Cost(f"{config.method}, {wire}", sent, compute_s, link.seconds(sent, 6)))
    return found


def smallest_round(config: RunConfig, cost: Cost) -> int:
    """The smallest H at which communication takes less than 5 % of the time; 1 step computes as long as now."""
    step_s = cost.compute_s / config.sync_every
    return max(1, math.ceil(cost.talk_s * (1 - SMALL_SHARE) / SMALL_SHARE / step_s))


def link_rows(config: RunConfig, plan: Plan, link: Link) -> list[list[str]]:
    """A table for people: bytes, seconds, tokens/s, the share of communication, and the smallest H for 5 %."""
    from . import console

    rows = [["", "sent per process", "compute", "communication", "tokens/s", "share", "H for 5 %"]]
    tokens = config.sync_every * config.global_batch_size * config.model.seq_len
    for cost in costs(config, plan, link):
        fewest = "" if cost.name == "dp" else str(smallest_round(config, cost))
        rows.append([
            cost.name, console.size(int(cost.sent_bytes)), console.duration(cost.compute_s),
            console.duration(cost.talk_s), console.count(tokens / (cost.compute_s + cost.talk_s)),
            f"{cost.share:.1%}", fewest,
        ])  # fmt: skip
    return rows
