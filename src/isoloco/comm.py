"""Comm: how processes meet. The only module of a training that imports torch.distributed.

P processes are I islands of G: process r is member r % G of island r // G. The members of an island are one worker at a
time and average gradients in every inner step. Each parameter has one owner among the P processes, which reduces it,
transforms it and keeps its momentum. Member j of an island meets only the members j of the others, for the parameters
that a member j owns: so what leaves an island does not grow with G.

One process is its own island and owns everything: each method is then the identity, and no byte is counted. The round
is written against these calls alone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

BUCKET_BYTES = 2**25  # of gradients that travel together


class Signal(IntEnum):
    """What a process asks of the others before a collective phase; the largest wins."""

    RUN = 0
    STOP = 1
    FAILED = 2


class Comm:
    """One process. ``sent_bytes`` and ``received_bytes`` are to and from others; ``link_bytes`` left the island."""

    rank = 0
    processes = 1
    islands = 1
    ordered = False

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.link_bytes = 0

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

    def close(self) -> None:
        """Leave the group."""


class ProcessComm(Comm):
    """A group of processes, as torchrun starts them; ``islands`` of equal size, ranks in a row."""

    def __init__(self, *, device: str, islands: int, ordered: bool, timeout_s: float) -> None:
        import torch.distributed as dist

        super().__init__()
        self.dist, self.timeout_s, self.ordered = dist, timeout_s, ordered
        wait = datetime.timedelta(seconds=timeout_s)
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self.rank, self.processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._ours = not dist.is_initialized()
        try:
            # plain data always goes through gloo: a host need not wait for its device to talk
            if self._ours:
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=wait)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"rank {self.rank} of {self.processes} could not meet the others at {place} within {timeout_s:g} s "
                f"({_first_line(error)}); are all started, with this address, and is the port free?"
            ) from None
        self.islands = islands
        self.device = device
        members, rank = self.members, self.rank
        with self._told("at the start"):
            rings = [[i * members + j for i in range(islands)] for j in range(members)]
            homes = [list(range(i * members, (i + 1) * members)) for i in range(islands)]
            self._ring, _ = dist.new_subgroups_by_enumeration(rings, timeout=wait) if islands > 1 else (None, None)
            self._home, _ = dist.new_subgroups_by_enumeration(homes, timeout=wait) if members > 1 else (None, None)
        self._home_ranks = homes[rank // members]

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """An error of the group in one line, which names this rank."""
        try:
            yield
        except RuntimeError as error:
            raise ValueError(
                f"rank {self.rank} of {self.processes} lost the others {what}, or waited {self.timeout_s:g} s for them "
                f"({_first_line(error)}); see their last lines, and go on with --resume"
            ) from None

    def _all_to_all(self, sent: list[Tensor], received_bytes: list[int], group: Any, own: int, *, link: bool) -> Any:
        """Each peer's part of what it sent to this process, as one flat uint8 tensor per peer."""
        import torch

        outgoing = torch.cat(sent)
        incoming = outgoing.new_empty(sum(received_bytes))
        sizes = [part.numel() for part in sent]
        self.dist.all_to_all_single(incoming, outgoing, received_bytes, sizes, group=group)
        self._count(sum(sizes) - sizes[own], sum(received_bytes) - received_bytes[own], link=link)
        return incoming.split(received_bytes)

    def _count(self, sent: int, received: int, *, link: bool) -> None:
        self.sent_bytes += sent
        self.received_bytes += received
        self.link_bytes += sent if link else 0

    def exchange(
        self, sent: Mapping[str, Tensor], owner: Mapping[str, int], size: Callable[[int, str], int]
    ) -> dict[str, list[Tensor]]:
        peers, own = self.peers(), self.island
        if self._ring is None:
            return super().exchange(sent, owner, size)
        like = next(iter(sent.values()))
        outgoing = [_flat([t for name, t in sent.items() if owner[name] == peer], like) for peer in peers]
        owned = [name for name in sent if owner[name] == self.rank]
        sizes = [[size(i, name) for name in owned] for i in range(len(peers))]
        with self._told("in the exchange of deltas"):
            arrived = self._all_to_all(outgoing, [sum(s) for s in sizes], self._ring, own, link=True)
        parts = [flat.split(s) for flat, s in zip(arrived, sizes, strict=True)]
        return {name: [part[k] for part in parts] for k, name in enumerate(owned)}

    def publish(self, tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> None:
        with self._told("while the anchor was published"):
            if self._ring is not None:
                mine = {name: t for name, t in tensors.items() if owner[name] % self.members == self.member}
                self._share(mine, owner, self._ring, self.peers(), link=True)
            if self._home is not None:
                holder = {name: self._home_ranks[owner[name] % self.members] for name in tensors}
                self._share(tensors, holder, self._home, self._home_ranks, link=False)

    def _share(
        self, tensors: Mapping[str, Tensor], holder: Mapping[str, int], group: Any, ranks: list[int], *, link: bool
    ) -> None:
        """Every rank of a group sends what it holds to all others."""
        import torch

        held = {rank: [t for name, t in tensors.items() if holder[name] == rank] for rank in ranks}
        like = next(iter(tensors.values())).new_empty(0).view(torch.uint8)
        out = _flat([_bytes(t) for t in held[self.rank]], like)
        sizes = [sum(t.numel() * t.element_size() for t in held[rank]) for rank in ranks]
        own = ranks.index(self.rank)
        for rank, flat in zip(ranks, self._all_to_all([out] * len(ranks), sizes, group, own, link=link), strict=True):
            if rank != self.rank:
                parts = flat.split([t.numel() * t.element_size() for t in held[rank]])
                for tensor, part in zip(held[rank], parts, strict=True):
                    tensor.view(-1).copy_(part.clone().view(tensor.dtype))

    def meet(self, weight: float, stop: bool) -> tuple[float, bool]:
        if self._home is None:
            return weight, stop
        import torch

        both = torch.tensor([weight, float(stop)], dtype=torch.float64)
        with self._told("before an inner step"):
            self.dist.all_reduce(both, group=self._home)
        return float(both[0]), bool(both[1])

    def inner_sum(self, tensors: Sequence[Tensor]) -> None:
        if self._home is None:
            return
        import torch

        with self._told("in an inner step"):
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                self.dist.all_reduce(flat, group=self._home)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
                carried = int(2 * flat.numel() * flat.element_size() * (self.members - 1) / self.members)
                self._count(carried, carried, link=False)

    def inner_fold(self, batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        import torch

        flats_KN = torch.stack([torch.cat([t.reshape(-1) for t in tensors]) for tensors in batches])
        everyone = [torch.empty_like(flats_KN) for _ in range(self.members)]
        with self._told("in an inner step"):
            self.dist.all_gather(everyone, flats_KN, group=self._home)
        carried = flats_KN.numel() * flats_KN.element_size() * (self.members - 1)
        self._count(carried, carried, link=False)
        first, *others = torch.cat(everyone)
        for flat in others:
            first += flat
        parts = first.split([t.numel() for t in batches[0]])
        return [part.view(t.shape) for part, t in zip(parts, batches[0], strict=True)]

    def agree(self, signal: Signal) -> Signal:
        import torch

        found = torch.tensor([int(signal)])
        with self._told("before a meeting"):
            self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return Signal(int(found))

    def gather(self, item: Any) -> list[Any]:
        found: list[Any] = [None] * self.processes
        with self._told("at a meeting"):
            self.dist.all_gather_object(found, item)
        return found

    def close(self) -> None:
        if self._ours:
            with contextlib.suppress(RuntimeError):
                self.dist.destroy_process_group()


def processes() -> int:
    """How many processes the launcher started (torchrun says so in the environment); 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype in groups of about BUCKET_BYTES."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (held >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    import torch

    return torch.cat(parts) if parts else like.new_empty(0)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
