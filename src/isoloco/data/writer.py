"""Writing tokens: shards that grow in place and can be taken up again, and files that are replaced in one move."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..files import to_disk
from .shards import scan
from .splits import Document

_HEADER_BYTES = 128  # of a one-dimensional .npy, whatever its length: numpy pads the number


class ShardWriter:
    """One split on its way to disk: tokens are appended to `SPLIT_NNNNNN.npy.partial`, renamed when it is full."""

    def __init__(
        self, directory: Path, split: str, dtype: str, shard_tokens: int, *, state: dict[str, Any] | None = None
    ) -> None:
        self._directory, self._split, self._shard_tokens = directory, split, shard_tokens
        self._dtype = np.dtype(dtype)
        state = state or {"documents": 0, "text_bytes": 0, "open_tokens": 0, "shards": []}
        self.documents: int = state["documents"]
        self.text_bytes: int = state["text_bytes"]
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self._open_tokens: int = state["open_tokens"]
        self._file: BinaryIO | None = None
        self._take_up()

    @property
    def tokens(self) -> int:
        """How many tokens were appended so far."""
        return sum(shard["tokens"] for shard in self.shards) + self._open_tokens

    def append(self, document: Document) -> None:
        """Add a document; it may go on in the next shard."""
        ids: np.ndarray = document.payload
        while len(ids):
            part = ids[: self._shard_tokens - self._open_tokens]
            if self._file is None:
                self._file = self._partial.open("w+b")
                self._file.write(bytes(_HEADER_BYTES))
            self._file.write(part.astype(self._dtype.newbyteorder("<"), copy=False).tobytes())
            self._open_tokens += len(part)
            ids = ids[len(part) :]
            if self._open_tokens == self._shard_tokens:
                self.close()
        self.documents += 1
        self.text_bytes += document.text_bytes

    def close(self) -> None:
        """Finish the open shard: header, fsync, its name."""
        if self._file is None:
            return
        self._file.seek(0)
        header = {"descr": f"<u{self._dtype.itemsize}", "fortran_order": False, "shape": (self._open_tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == _HEADER_BYTES
        self._sync()
        self._file.close()
        os.replace(self._partial, self._final)
        digest, largest = scan(self._final)
        self.shards.append(
            {
                "file": self._final.name,
                "tokens": self._open_tokens,
                "max_id": largest,
                "blake2b": digest,
            }
        )
        self._file, self._open_tokens = None, 0

    def state(self) -> dict[str, Any]:
        """What it takes to go on from here, as JSON; everything appended is on disk when this returns."""
        self._sync()
        return {
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "open_tokens": self._open_tokens,
            "shards": self.shards,
        }

    def abandon(self) -> None:
        """Let go of the open file, as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _final(self) -> Path:
        return self._directory / f"{self._split}_{len(self.shards):06d}.npy"

    @property
    def _partial(self) -> Path:
        return self._final.with_name(self._final.name + ".partial")

    def _sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _take_up(self) -> None:
        # what was written behind the saved state is written again
        if self._open_tokens:
            if self._final.exists():  # it was finished, but the state does not know yet
                os.replace(self._final, self._partial)
            self._file = self._partial.open("r+b")
            self._file.truncate(_HEADER_BYTES + self._open_tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)
        kept = {shard["file"] for shard in self.shards} | ({self._partial.name} if self._open_tokens else set())
        for path in self._directory.glob(f"{self._split}_*.npy*"):
            if path.name not in kept:
                path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one move: the old one or the new one is there, never half."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    to_disk(path.parent)
