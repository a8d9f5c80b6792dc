"""Comm of several processes, as torchrun starts them: the only module of a training that imports torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import Comm, Signal

BUCKET_BYTES = 2**25  # of gradients that travel together
CHUNK_BYTES, CHUNKS_UNDER_WAY = 2**18, 4  # of what two processes send each other at a time
T = TypeVar("T")


def _within(meet: Callable[[], object], seconds: float) -> None:
    """Meet the others, or TimeoutError; what `meet` raises is raised.

    In a thread: with a stranger on the port, who accepts and says nothing, torch waits for ever, and hears no Ctrl-C.
    """
    ended: list[Exception | None] = [TimeoutError("nobody answered")]

    def run() -> None:
        try:
            meet()
            ended[0] = None
        except Exception as error:  # raised below
            ended[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if ended[0] is not None:
        raise ended[0]


class ProcessComm(Comm):
    """A group of processes, as torchrun starts them; ``islands`` of equal size, ranks in a row."""

    def __init__(self, *, device: str, islands: int, ordered: bool, timeout_s: float) -> None:
        super().__init__()
        self.timeout_s, self.ordered = timeout_s, ordered
        wait = datetime.timedelta(seconds=timeout_s)
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self.rank, self.processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._ours = not dist.is_initialized()
        try:
            # plain data always goes through gloo: a host need not wait for its device to talk
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            if self._ours:
                _within(lambda: dist.init_process_group(backend, timeout=wait), 2 * timeout_s)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise ValueError(
                f"could not meet the other {self.processes - 1} processes at {place} within {timeout_s:g} s "
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
    def _told(self, what: str, *, timed: bool = False) -> Iterator[None]:
        """An error of the group in one line."""
        started = time.perf_counter()
        try:
            yield
            self.seconds += time.perf_counter() - started if timed else 0.0
        except RuntimeError as error:
            raise ValueError(
                f"lost the others {what}, or waited comm.timeout_s = {self.timeout_s:g} s for them "
                f"({_first_line(error)}); see what they said last, and go on with --resume"
            ) from None

    def _all_to_all(
        self, sent: list[Tensor], received_bytes: list[int], group: Any, own: int, *, largest: int, link: bool
    ) -> list[Tensor]:
        """What each peer sent to this process, flat uint8; ``largest``: bytes of the longest part of any two peers.

        In small pieces, a few on their way at a time: gloo has one connection between two processes, and whole messages
        that cross on it take turns, which doubles the time on a slow link.
        """
        arrived = [sent[i] if i == own else sent[i].new_empty(n) for i, n in enumerate(received_bytes)]
        piece = CHUNK_BYTES if sent[0].device.type == "cpu" else max(largest, 1)
        under_way: deque[tuple[Any, Tensor, list[Tensor], Tensor]] = deque()

        def take_first() -> None:
            work, incoming, places, _ = under_way.popleft()
            work.wait()
            if incoming.numel() and incoming.data_ptr() not in {place.data_ptr() for place in places}:
                for place, found in zip(places, incoming.split([p.numel() for p in places]), strict=True):
                    place.copy_(found)

        for start in range(0, largest, piece):
            parts = [part[start : start + piece] if i != own else part[:0] for i, part in enumerate(sent)]
            places = [part[start : start + piece] if i != own else part[:0] for i, part in enumerate(arrived)]
            outgoing, sizes = _joined(parts), [place.numel() for place in places]
            filled = [place for place in places if place.numel()]
            incoming = filled[0] if len(filled) == 1 else outgoing.new_empty(sum(sizes))  # straight to its place
            work = dist.all_to_all_single(
                incoming, outgoing, sizes, [part.numel() for part in parts], group=group, async_op=True
            )
            under_way.append((work, incoming, places, outgoing))  # outgoing is kept alive until it has gone
            if len(under_way) == CHUNKS_UNDER_WAY:
                take_first()
        while under_way:
            take_first()
        lengths = [part.numel() for part in sent]
        self._count(sum(lengths) - lengths[own], sum(received_bytes) - received_bytes[own], link=link)
        return arrived

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
        lengths = {
            peer: [sum(size(i, n) for n in sent if owner[n] == peer) for i in range(len(peers))] for peer in peers
        }
        largest = max(length for peer in peers for length in lengths[peer])
        with self._told("in the exchange of deltas", timed=True):
            arrived = self._all_to_all(outgoing, lengths[self.rank], self._ring, own, largest=largest, link=True)
        parts = [flat.split(s) for flat, s in zip(arrived, sizes, strict=True)]
        return {name: [part[k] for part in parts] for k, name in enumerate(owned)}

    def publish(self, tensors: Mapping[str, Tensor], owner: Mapping[str, int]) -> None:
        with self._told("while the anchor was published", timed=True):
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
        held = {rank: [t for name, t in tensors.items() if holder[name] == rank] for rank in ranks}
        like = next(iter(tensors.values())).new_empty(0).view(torch.uint8)
        out = _flat([_bytes(t) for t in held[self.rank]], like)
        sizes = [sum(t.numel() * t.element_size() for t in held[rank]) for rank in ranks]
        own = ranks.index(self.rank)
        arrived = self._all_to_all([out] * len(ranks), sizes, group, own, largest=max(sizes), link=link)
        for rank, flat in zip(ranks, arrived, strict=True):
            if rank != self.rank:
                parts = flat.split([t.numel() * t.element_size() for t in held[rank]])
                for tensor, part in zip(held[rank], parts, strict=True):
                    aligned = part if part.storage_offset() % tensor.element_size() == 0 else part.clone()
                    tensor.view(-1).copy_(aligned.view(tensor.dtype))

    def meet(self, weight: float, stop: bool) -> tuple[float, bool]:
        if self._home is None:
            return weight, stop
        both = torch.tensor([weight, float(stop)], dtype=torch.float64)
        with self._told("before an inner step"):
            dist.all_reduce(both, group=self._home)
        return float(both[0]), bool(both[1])

    def inner_sum(self, tensors: Sequence[Tensor]) -> None:
        if self._home is None:
            return
        with self._told("in an inner step", timed=True):
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat, group=self._home)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
                carried = int(2 * flat.numel() * flat.element_size() * (self.members - 1) / self.members)
                self._count(carried, carried, link=False)

    def inner_fold(self, batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        flats_KN = torch.stack([torch.cat([t.reshape(-1) for t in tensors]) for tensors in batches])
        everyone = [torch.empty_like(flats_KN) for _ in range(self.members)]
        with self._told("in an inner step", timed=True):
            dist.all_gather(everyone, flats_KN, group=self._home)
        carried = flats_KN.numel() * flats_KN.element_size() * (self.members - 1)
        self._count(carried, carried, link=False)
        first, *others = torch.cat(everyone)
        for flat in others:
            first += flat
        parts = first.split([t.numel() for t in batches[0]])
        return [part.view(t.shape) for part, t in zip(parts, batches[0], strict=True)]

    def agree(self, signal: Signal) -> Signal:
        found = torch.tensor([int(signal)])
        with self._told("before a meeting"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return Signal(int(found))

    def gather(self, item: Any) -> list[Any]:
        found: list[Any] = [None] * self.processes
        with self._told("at a meeting"):
            dist.all_gather_object(found, item)
        return found

    def together(self, do: Callable[[], T]) -> T:
        value, told = _tried(do)
        told_by = self.gather(told)
        self._raise_first(told_by)
        return value  # type: ignore[return-value]

    def from_leader(self, do: Callable[[], T]) -> T:
        value, told = self.gather(_tried(do) if self.rank == 0 else None)[0]
        self._raise_first([told])
        return value

    def _raise_first(self, told_by: list[str | None]) -> None:
        """Each failed process says its own line, the others whose it was."""
        failed = {rank: told for rank, told in enumerate(told_by) if told is not None}
        if self.rank in failed:
            raise ValueError(failed[self.rank])
        for rank, told in failed.items():
            raise ValueError(f"rank {rank} cannot go on: {told}")

    def close(self) -> None:
        # the groups' threads end with the last reference, which must not be left to the interpreter's end
        self._ring = self._home = None
        if self._ours:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _tried(do: Callable[[], T]) -> tuple[T | None, str | None]:
    """What came of it, or the line of its error."""
    try:
        return do(), None
    except (ValueError, MemoryError) as error:
        return None, str(error)


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
    return tensor.detach().reshape(-1).view(torch.uint8)


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other; no copy where only one has anything."""
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(parts)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
