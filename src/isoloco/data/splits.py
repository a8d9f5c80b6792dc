"""Which split a document goes to: by a hash of seed and text, as fractions or as numbers of tokens, in one pass."""

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """A document on its way to a split."""

    key: float
    """In [0, 1), uniform; see `key_of`."""
    index: int
    """Its place in the source."""
    text_bytes: int
    payload: Any
    """Token ids [tokens]; or pieces of text, where a tokenizer is yet to be trained."""
    size: int
    """What a split's size is counted in: tokens with the end of the document, or bytes."""


def key_of(text: str, seed: int) -> float:
    """A hash of the seed and the text to [0, 1): the same text goes to the same split, so no copy is held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Held:
    """The documents of the smallest (or largest) keys that together reach a size, of all that were offered.

    One pass, in whatever order they come, and memory for these documents alone: a newcomer with a smaller key drives
    out the largest that are no longer needed to reach the size.
    """

    def __init__(self, size: float, *, smallest: bool, documents: list[Document] | None = None) -> None:
        self.size = size
        self._sign = -1 if smallest else 1  # heapq has the smallest at its head: the one to drive out
        self._heap: list[tuple[float, int, Document]] = []
        self._total = 0
        for document in documents or []:
            self._push(document)

    @property
    def documents(self) -> list[Document]:
        """What is held, in the order of the source."""
        return sorted((entry[2] for entry in self._heap), key=lambda document: document.index)

    def offer(self, document: Document) -> list[Document]:
        """Take a document in; returns those that are out now, maybe this very one."""
        self._push(document)
        out = []
        while self._total - self._heap[0][2].size >= self.size:
            out.append(heapq.heappop(self._heap)[2])
            self._total -= out[-1].size
        return out

    def _push(self, document: Document) -> None:
        heapq.heappush(self._heap, (self._sign * document.key, self._sign * document.index, document))
        self._total += document.size


class Splitter:
    """Sends documents to train, valid and test.

    valid has the smallest keys and test the largest of the others: below 1, `valid` and `test` are fractions of the
    range of keys; from 1 on they are sizes, and the documents with the smallest (largest) keys are held until the end.
    """

    def __init__(self, *, valid: float, test: float, held: dict[str, list[Document]] | None = None) -> None:
        held = held or {}
        self._valid, self._test = valid, test
        self.held: dict[str, Held] = {}
        if valid >= 1:
            self.held["valid"] = Held(valid, smallest=True, documents=held.get("valid"))
        if test >= 1:
            self.held["test"] = Held(test, smallest=False, documents=held.get("test"))

    def place(self, document: Document) -> Iterator[tuple[str, Document]]:
        """Where a document goes, and those that it drives out of a split of a given size; nothing while it is held."""
        if self._valid < 1 and document.key < self._valid:
            yield "valid", document
            return
        for left in self.held["valid"].offer(document) if "valid" in self.held else [document]:
            if self._test < 1 and left.key >= 1 - self._test:
                yield "test", left
            else:
                for out in self.held["test"].offer(left) if "test" in self.held else [left]:
                    yield "train", out
