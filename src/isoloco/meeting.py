"""A meeting of elastic workers, and what all conclude from the cards they lay down: plain data, no torch.

From the same cards everybody draws the same conclusions (`arrange`): whose state the meeting goes on from, who is
behind and gets it from whom, what the deltas weigh. So nobody has to be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .seeds import stable_hash


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


def _most(values: Iterable[Any]) -> Any:
    """The most frequent value; of several the one that comes first."""
    return Counter(values).most_common(1)[0][0]
