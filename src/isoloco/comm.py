"""Comm: how processes meet.

P processes are I islands of G: process r is member r % G of island r // G. The members of an island are one worker at a
time and average gradients in every inner step. Each parameter has one owner among the P processes, which reduces it,
transforms it and keeps its momentum. Member j of an island meets only the members j of the others, for the parameters
that a member j owns: so what leaves an island does not grow with G.

One process is its own island and owns everything: each method is then the identity, and no byte is counted. The round
is written against these calls alone; `isoloco.processes` has them for several processes.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from .config import RunConfig

T = TypeVar("T")


class Signal(IntEnum):
    """What a process asks of the others before a collective phase; the largest wins."""

    RUN = 0
    STOP = 1


class Comm:
    """One process. ``sent_bytes`` and ``received_bytes`` are to and from others; ``link_bytes`` left the island."""

    rank = 0
    processes = 1
    islands = 1
    ordered = False
    timeout_s = 600.0

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.link_bytes = 0
        self.seconds = 0.0  # spent on bytes that were counted

    @property
    def members(self) -> int:
        """G: processes of an island."""
        return self.processes // self.islands

    @property
    def island(self) -> int:
        return self.rank // self.members

    @property
    def member(self) -> int:
        return self.rank % self.members

    @property
    def folds(self) -> bool:
        """Whether gradients of an island are summed micro-batch by micro-batch, in one order."""
        return self.ordered and self.members > 1

    def peers(self) -> list[int]:
        """Ranks that exchange deltas with this one, itself among them: the same member of every island."""
        return [island * self.members + self.member for island in range(self.islands)]

    def hosted(self, workers: int) -> list[int]:
        """Ids of the workers that take turns in this island."""
        if workers % self.islands:
            lower = workers // self.islands * self.islands
            fitting = f"{lower} or {lower + self.islands}" if lower else f"{self.islands}"
            raise ValueError(f"workers {workers}: cannot be shared evenly by {self.islands} islands; use {fitting}")
        share = workers // self.islands
        return list(range(self.island * share, (self.island + 1) * share))

    def owners(self, costs: Mapping[str, float]) -> dict[str, int]:
        """Owner of each parameter: heaviest first, each to the process with the least so far."""
        load = [0.0] * self.processes
        owner: dict[str, int] = {}
        for name in sorted(costs, key=lambda n: (-costs[n], n)):
            owner[name] = min(range(self.processes), key=load.__getitem__)
            load[owner[name]] += costs[name]
        return owner

    def exchange(
        self, sent: Mapping[str, Tensor], owner: Mapping[str, int], size: Callable[[int, str], int]
    ) -> dict[str, list[Tensor]]:
        """Send every owner its slice: for each parameter owned here, what each of `peers` sent, in their order.

        Tensors are flat uint8; ``size(i, name)`` tells how many bytes the i-th peer sends for a parameter.
        """
        return {name: [tensor] for name, tensor in sent.items()}

    def publish(self, tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> None:
        """Give everybody the owners' tensors, in place."""

    def share(self, batches: list[Any]) -> list[Any]:
        """The micro-batches of an inner step that this member of the island takes: its part of them, in order."""
        share, rest = divmod(len(batches), self.members)
        if rest:
            raise ValueError(
                f"{len(batches)} micro-batches of an inner step cannot be shared evenly by {self.members} processes; "
                f"choose micro_batch_size so that their number is a multiple of {self.members}"
            )
        return batches[self.member * share : (self.member + 1) * share]

    def meet(self, weight: float, stop: bool) -> tuple[float, bool]:
        """Before an inner step: the total weight of the island's batches, and whether a member was told to stop."""
        return weight, stop

    def inner_sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the island, in place."""

    def inner_fold(self, batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Sum the tensors of every micro-batch of the island, one after the other in the order of the members.

        Takes memory for all of them; bitwise what one process gets that reads all micro-batches in turn.
        """
        raise AssertionError("only an island of several processes folds")

    def agree(self, signal: Signal) -> Signal:
        """The most urgent signal of all processes."""
        return signal

    def gather(self, item: Any) -> list[Any]:
        """Plain data of every process, by rank."""
        return [item]

    def together(self, do: Callable[[], T]) -> T:
        """Do something that may fail in every process. Where one fails all do: ValueError, in a line each."""
        return do()

    def from_leader(self, do: Callable[[], T]) -> T:
        """Plain data that process 0 makes and all get; where it fails all do."""
        return do()

    def close(self) -> None:
        """Leave the group."""


def processes() -> int:
    """How many processes the launcher started (torchrun says so in the environment); 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of `processes` this one is."""
    return int(os.environ.get("RANK", "0"))


def connect(config: RunConfig) -> Comm:
    """Meet the other processes of the launch, laid out as a config says; one process needs nobody.

    Raises:
        ValueError: processes, islands and workers do not fit together; the others are not there in time.
    """
    shape = layout(config)
    if shape.processes == 1:
        return shape
    from .processes import ProcessComm

    return ProcessComm(
        device=config.compute.device,
        islands=shape.islands,
        ordered=config.comm.ordered,
        timeout_s=config.comm.timeout_s,
    )


def layout(config: RunConfig) -> Comm:
    """The processes of the launch as a config lays them out, nobody met yet. ValueError where they do not fit it."""
    started, members = processes(), config.compute.processes_per_worker
    if config.is_dp:
        if members != 1:
            raise ValueError("compute.processes_per_worker: dp averages over all processes anyhow; leave it at 1")
        members = started
    if started % members:
        lower = started // members * members
        fitting = f"{lower} or {lower + members}" if lower else f"{members}"
        those = f"{started} process{'es' * (started > 1)}"
        raise ValueError(
            f"compute.processes_per_worker {members} does not divide the {those} that were started; "
            f"start {fitting} of them (torchrun --nproc-per-node)"
        )
    shape = Comm()
    shape.processes, shape.islands = started, started // members
    shape.hosted(config.workers)  # says what would fit
    batches = (config.workers if config.is_dp else 1) * config.worker_batch_size // (config.micro_batch_size or 1)
    shape.share([None] * batches)
    return shape
