"""How elastic workers meet: torchft's Lighthouse says who is there, a gloo group of those carries what they bring.

Each process lays down a `Card` at the Lighthouse and gets the cards of all who are there at that time. From the same
cards everybody draws the same conclusions (`arrange`): whose state the meeting goes on from, who is behind and gets it
from whom, what the deltas weigh. What needs all of them runs in a `Group`; once one of its processes is lost nothing of
the meeting counts, and those who are left meet again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .seeds import stable_hash

HEARTBEAT_S = 0.5  # the Lighthouse takes a worker for dead after 5 s without one, unless it is told otherwise
CONNECT_S = 20.0  # in which a member that is alive answers
PIECE_BYTES = 2**24  # of a state that is handed over, so that each piece arrives in time


class Lost(Exception):
    """A member of the meeting is gone, or did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a worker says of itself. ``lineage`` is how its anchor came about: two of one lineage have the same."""

    worker: int
    born_s: float  # of two processes with one worker id the later one counts
    identity: str  # of its config and data
    round: int
    step: int
    lineage: str
    digest: str  # of the anchor, where it is compared
    waits: bool  # for everybody, before the first round
    trained: bool
    weight: float  # inner steps that are in its delta
    loss: float | None
    skipped: int
    norm: float  # of its delta
    group: str  # the group that it is still connected to
    ticket: str
    store: str  # where a group of which it is the first member connects


@dataclass(frozen=True)
class Meeting:
    """What follows from the cards: all members conclude the same."""

    cards: list[Card]  # by worker
    base: Card  # whose state the meeting goes on from
    donors: dict[int, int]  # worker that is behind -> worker that gives it its state

    @property
    def workers(self) -> list[int]:
        return [card.worker for card in self.cards]

    @property
    def counted(self) -> list[Card]:
        """The cards of those whose deltas are of the base's anchor, and not empty."""
        return [card for card in self.cards if card.lineage == self.base.lineage and card.weight > 0]

    @property
    def weight(self) -> float:
        """Of all deltas together."""
        return sum(card.weight for card in self.counted)

    @property
    def key(self) -> str:
        """Name of this meeting and of no other."""
        return f"{stable_hash(*(card.ticket for card in self.cards)):x}"

    def waits(self, workers: int) -> bool:
        """Whether nobody has begun and others are expected: all meet again in a moment."""
        return len(self.cards) < workers and all(card.waits for card in self.cards)


def arrange(cards: Sequence[Card]) -> Meeting:
    """A meeting of one config; members of another are left out, and so are processes whose worker id was taken over.

    The meeting goes on from the furthest round; of several anchors there, from the one that most members have.
    """
    latest = {card.worker: card for card in sorted(cards, key=lambda card: (card.born_s, card.ticket))}
    members = [latest[worker] for worker in sorted(latest)]
    identity = _most(card.identity for card in members)
    members = [card for card in members if card.identity == identity]
    furthest = [card for card in members if card.round == max(each.round for each in members)]
    lineage, digest = _most((card.lineage, card.digest) for card in furthest)
    holders = [card for card in furthest if (card.lineage, card.digest) == (lineage, digest)]
    behind = [card.worker for card in members if card not in holders]
    donors = {worker: holders[i % len(holders)].worker for i, worker in enumerate(behind)}
    return Meeting(members, holders[0], donors)


def _most(values: Iterator[Any]) -> Any:
    """The most frequent value; of several the one that comes first."""
    return Counter(values).most_common(1)[0][0]


class Lighthouse:
    """The client's side of torchft's Lighthouse: who is there. Heartbeats run beside the training."""

    def __init__(self, address: str, *, worker: int, timeout_s: float) -> None:
        self.address = address if "//" in address else f"http://{address}"
        self.timeout_s = timeout_s
        self.replica = f"worker-{worker}-{secrets.token_hex(4)}"
        self._tickets = 0
        self._client = self._patiently(lambda client: client)
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Be no longer there."""
        self._closed.set()

    def ticket(self) -> str:
        """A new one for each card."""
        self._tickets += 1
        return f"{self.replica}-{self._tickets}"

    def cards(self, card: Card) -> list[Card]:
        """Lay down a card, and wait for those of all others who are there. ValueError once comm.timeout_s is over."""

        def ask(client: Any) -> Any:
            left = datetime.timedelta(seconds=self.timeout_s)
            return client.quorum(
                replica_id=self.replica, timeout=left, store_address=card.store, step=card.round, world_size=1,
                data=asdict(card),
            )  # fmt: skip

        found: list[Any] = []

        def answer() -> None:
            try:
                found.append(self._patiently(ask))
            except ValueError as error:
                found.append(error)

        # in a thread of its own, so that signals are heard meanwhile
        asking = threading.Thread(target=answer, name="quorum", daemon=True)
        asking.start()
        while asking.is_alive():
            asking.join(0.2)
        if isinstance(found[0], ValueError):
            raise found[0]
        return [Card(**member.data) for member in found[0].participants]

    def _patiently(self, do: Any) -> Any:
        """Ask the Lighthouse, and once more where it is gone, until it is back."""
        from torchft.coordination import LighthouseClient

        started = time.monotonic()
        client = getattr(self, "_client", None)
        while True:
            try:
                if client is None:
                    client = LighthouseClient(self.address, datetime.timedelta(seconds=min(CONNECT_S, self.timeout_s)))
                    if hasattr(self, "_client"):
                        time.sleep(2 * HEARTBEAT_S)  # so that one that was started anew has heard of the others
                self._client = client
                return do(client)
            except (RuntimeError, TimeoutError) as error:
                if time.monotonic() - started > self.timeout_s:
                    raise ValueError(
                        f"the Lighthouse at {self.address} named no members within comm.timeout_s = "
                        f"{self.timeout_s:g} s ({_first_line(error)}); is it running, and can it be reached?"
                    ) from None
                client = None
                time.sleep(HEARTBEAT_S)

    def _beat(self) -> None:
        from torchft.coordination import LighthouseClient

        client = None
        while not self._closed.wait(HEARTBEAT_S):
            try:
                client = client or LighthouseClient(self.address, datetime.timedelta(seconds=HEARTBEAT_S))
                client.heartbeat(self.replica, datetime.timedelta(seconds=HEARTBEAT_S))
            except (RuntimeError, TimeoutError):
                client = None


class Group:
    """The members of a meeting, connected: every method needs all of them, and is `Lost` where one is missing."""

    def __init__(self, *, timeout_s: float) -> None:
        from torch.distributed import TCPStore
        from torchft.process_group import ProcessGroupGloo

        self.timeout_s, self.key = timeout_s, ""
        self._connect_s = min(CONNECT_S, timeout_s)
        self._store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        self.store = f"{socket.gethostname()}:{self._store.port}"
        self._processes = ProcessGroupGloo(timeout=datetime.timedelta(seconds=self._connect_s))
        self._size = 1

    def connect(self, meeting: Meeting, worker: int) -> None:
        """Become the group of a meeting; the one from the meeting before is kept where all still have it."""
        cards = meeting.cards
        if self.key and len(cards) == self._size and all(card.group == self.key for card in cards):
            return
        self.leave()
        with self._lost():
            for card in cards:  # one that has died since refuses, which saves waiting for it
                host, _, port = card.store.rpartition(":")
                socket.create_connection((host, int(port)), timeout=self._connect_s).close()
            if len(cards) > 1:
                rank = meeting.workers.index(worker)
                self._processes.configure(f"{cards[0].store}/{meeting.key}", str(worker), rank, len(cards))
        self.key, self._size = meeting.key, len(cards)
        self._ranks = {card.worker: rank for rank, card in enumerate(cards)}

    def leave(self) -> None:
        """Cut the connections: the others, who may still wait for this one, notice at once."""
        if self.key:
            self._processes.abort(errored=False)
        self.key = ""

    def sum(self, flat: Tensor) -> None:
        """Sum over the members, in place."""
        from torch.distributed import AllreduceOptions

        if self._size > 1:
            options = AllreduceOptions()
            options.timeout = datetime.timedelta(seconds=self.timeout_s)
            with self._lost():
                self._processes.allreduce([flat], options).wait()

    def confirm(self) -> None:
        """All members have come this far."""
        self.sum(torch.ones(1))

    def send(self, worker: int, data: bytes) -> None:
        """Hand a state to another member."""
        length = torch.tensor([len(data)])
        with self._lost():
            for piece in (length, *_pieces(torch.frombuffer(bytearray(data), dtype=torch.uint8))):
                self._processes.send([piece], self._ranks[worker], 0).wait()

    def receive(self, worker: int) -> bytes:
        """What another member sends."""
        length = torch.tensor([0])
        with self._lost():
            self._processes.recv([length], self._ranks[worker], 0).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            for piece in _pieces(data):
                self._processes.recv([piece], self._ranks[worker], 0).wait()
        return data.numpy().tobytes()

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.leave()
            raise Lost(_first_line(error)) from None


def _pieces(data: Tensor) -> Sequence[Tensor]:
    return data.split(PIECE_BYTES) if data.numel() else ()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def check_torchft() -> None:
    """ValueError, with the command that installs it, where torchft is missing."""
    os.environ.setdefault("RUST_LOG", "warn")  # read as it is imported: who wants every request in the log says so
    try:
        import torchft.coordination  # noqa: F401
    except ImportError:
        told = "--elastic needs the package torchft, which is not installed"
        raise ValueError(f"{told}; install it: pip install 'isoloco[torchft]'") from None
