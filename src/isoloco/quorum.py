"""How elastic workers meet: torchft's Lighthouse says who is there, a gloo group of those carries what they bring.

Each process lays down a card at the Lighthouse and gets the cards of all who are there (see `isoloco.meeting`). What
needs all of them runs in a `Group`; once one of its processes is lost nothing of the meeting counts, and those who are
left meet again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .meeting import Card, Meeting

HEARTBEAT_S = 0.5  # the Lighthouse takes a worker for dead after 5 s without one, unless it is told otherwise
ANSWER_S = 2.0  # in which it answers a heartbeat
CONNECT_S = 20.0  # in which a member that is alive answers
PIECE_BYTES = 2**24  # of a state that is handed over, so that each piece arrives in time


class Lost(Exception):
    """A member of the meeting is gone, or did not answer in time."""


class Lighthouse:
    """The client's side of torchft's Lighthouse: who is there. Heartbeats run beside the training."""

    def __init__(self, address: str, *, worker: int, timeout_s: float, warn: Callable[[str], None]) -> None:
        self.address = address if "//" in address else f"http://{address}"
        self.timeout_s, self.warn = timeout_s, warn
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
            left = _seconds(self.timeout_s)
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

        started, tried = time.monotonic(), False
        client = getattr(self, "_client", None)
        while True:
            try:
                if client is None:
                    client = LighthouseClient(self.address, _seconds(min(CONNECT_S, self.timeout_s)))
                    if hasattr(self, "_client"):
                        time.sleep(2 * HEARTBEAT_S)  # so that one that was started anew has heard of the others
                self._client = client
                return do(client)
            except (RuntimeError, TimeoutError) as error:
                if not tried:
                    self.warn(f"no answer from the Lighthouse at {self.address}; trying for {self.timeout_s:g} s")
                tried = True
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
                client = client or LighthouseClient(self.address, _seconds(ANSWER_S))
                client.heartbeat(self.replica, _seconds(ANSWER_S))
            except (RuntimeError, TimeoutError):
                client = None


class Group:
    """The members of a meeting, connected: every method needs all of them, and is `Lost` where one is missing."""

    def __init__(self, *, timeout_s: float) -> None:
        from torch.distributed import TCPStore
        from torchft.process_group import ProcessGroupGloo

        self.timeout_s, self.key = timeout_s, ""
        self._connect_s = min(CONNECT_S, timeout_s)
        host = socket.gethostname()
        try:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_seconds(self._connect_s))
        except RuntimeError as error:
            raise ValueError(
                f"this machine cannot be reached by its own name {host} ({_first_line(error)}); make it resolve here "
                "and on the machines of the other workers"
            ) from None
        self.store = f"{host}:{self._store.port}"
        self._processes = ProcessGroupGloo(timeout=_seconds(self._connect_s))
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
            options.timeout = _seconds(self.timeout_s)
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


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


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
