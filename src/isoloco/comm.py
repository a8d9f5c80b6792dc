"""Comm: how processes meet. The only module that may import torch.distributed.

One process is its own island and owns everything: each method is then the identity, and no byte is counted. The round
is written against these five calls alone, so that more processes need no other round.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class Signal(IntEnum):
    """What a process asks of the others before a collective phase; the largest wins."""

    RUN = 0
    SAVE = 1
    STOP = 2
    FAILED = 3


class Comm:
    """A group of processes: ``processes`` of them, each with ``rank``, in ``islands`` of equal size."""

    def __init__(self) -> None:
        self.rank = 0
        self.processes = 1
        self.islands = 1
        self.sent_bytes = 0
        self.received_bytes = 0

    def hosted(self, workers: int) -> list[int]:
        """Ids of the workers that take turns in this process."""
        return list(range(workers))

    def owners(self, costs: Mapping[str, float]) -> dict[str, int]:
        """Owner of each parameter: heaviest first, each to the process with the least so far."""
        load = [0.0] * self.processes
        owner: dict[str, int] = {}
        for name in sorted(costs, key=lambda n: (-costs[n], n)):
            owner[name] = min(range(self.processes), key=load.__getitem__)
            load[owner[name]] += costs[name]
        return owner

    def exchange(self, tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> dict[str, list[Tensor]]:
        """Send every owner its slice: for each parameter owned here, what each process sent, in process order."""
        return {name: [tensor] for name, tensor in tensors.items() if owner[name] == self.rank}

    def publish(self, tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> None:
        """Give everybody the owners' tensors, in place."""

    def inner_mean(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients within the island (all processes, for data-parallel training), in place."""

    def agree(self, signal: Signal) -> Signal:
        """The most urgent signal of all processes."""
        return signal

    def gather(self, item: Any) -> list[Any]:
        """Plain data of every process, in process order."""
        return [item]
