"""One preparation: a fold over the documents of a source, whose state is saved every few seconds."""

import contextlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..files import digest, seal
from . import tokenizer as tokenizers
from .progress import Progress
from .shards import FORMAT, MANIFEST, SPLITS, STATE
from .sources import Piece, Source
from .splits import Document, Splitter, key_of
from .tokenizer import Tokenizer
from .writer import ShardWriter, write_json

CHECKPOINT_S = 10.0  # how much work an interruption may cost
BATCH_CHARS = 2**16  # text that a thread encodes at a time
TRAINING_BYTES = 2**28  # text that train:bpe reads at most
BYTES_PER_TOKEN = 8  # more than tokens hold on average: keeps held-out text out of the tokenizer's training
TOKENIZER = "tokenizer"


class Preparation:
    """The state of a preparation and the steps that move it on; `run` takes it to the manifest.

    The state is a cursor of the source, how many tokens of the open shards count, and the documents held for a split of
    a given size. It is saved behind whole documents, tokens first. All else follows from it and the source, so going on
    from any saved state gives the same bytes.
    """

    def __init__(self, directory: Path, request: dict[str, Any], source: Source, spec: str, shown: Progress) -> None:
        self._directory, self._request, self._source, self._spec = directory, request, source, spec
        self._shown = shown
        path = directory / STATE
        if not path.exists():
            write_json(path, {"request": request})
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "eos" in state:
            self._tokenizer = tokenizers.reload(directory / TOKENIZER, state["eos"])
        else:
            self._tokenizer = self._make_tokenizer()
        self._cursor: list[Any] | None = state.get("cursor")
        self.documents: int = state.get("documents", 0)
        self._empty: int = state.get("empty_documents", 0)
        self._held_file: str | None = state.get("held_file")
        held = self._load_held(state.get("held", {}))
        self._held_indices = {split: [d.index for d in documents] for split, documents in held.items()}
        self._splitter = Splitter(valid=request["valid_tokens"], test=request["test_tokens"], held=held)
        splits = state.get("splits", {})
        dtype, shard_tokens = self._tokenizer.dtype, request["shard_tokens"]
        self._writers = {s: ShardWriter(directory, s, dtype, shard_tokens, state=splits.get(s)) for s in SPLITS}
        self._saved_s = time.monotonic()

    def run(self) -> None:
        """From where it stands to the manifest."""
        try:
            self._save()
            self._read()
            self._finish()
        finally:
            for writer in self._writers.values():
                writer.abandon()

    def _make_tokenizer(self) -> Tokenizer:
        size = tokenizers.bpe_size(self._spec)
        if size:
            made = tokenizers.train_bpe(self._training_text(), size)
        else:
            made = tokenizers.load_tokenizer(self._spec)
        shutil.rmtree(self._directory / TOKENIZER, ignore_errors=True)
        made.save(self._directory / TOKENIZER)
        return made

    def _training_text(self) -> Iterator[str]:
        """Text of training documents; how many tokens they have is not known yet, so more than needed is left out."""
        valid, test = self._request["valid_tokens"], self._request["test_tokens"]
        splitter = Splitter(
            valid=valid * BYTES_PER_TOKEN if valid >= 1 else valid, test=test * BYTES_PER_TOKEN if test >= 1 else test
        )
        pieces: list[str] = []
        read = 0
        for piece in self._source.read():
            pieces.append(piece.text)
            if piece.last:
                size = sum(len(text.encode()) for text in pieces)
                document = Document(key_of(pieces[0], self._request["seed"]), 0, size, pieces, size)
                for split, placed in splitter.place(document):
                    if split == "train":
                        yield from placed.payload
                        read += placed.size
                        self._shown.show(f"training the tokenizer: {read / 1e6:,.1f} MB of text")
                pieces = []
            if read >= TRAINING_BYTES:
                return
        if not read:
            raise ValueError(self._nothing("train"))

    def _read(self) -> None:
        limit = self._request["max_tokens"] or float("inf")
        eos = np.array([self._tokenizer.eos_id], dtype=self._tokenizer.dtype)
        parts: list[np.ndarray] = []
        key, text_bytes = 0.0, 0
        if self._writers["train"].tokens >= limit:
            return
        with contextlib.closing(_encoded(self._source.read(self._cursor), self._tokenizer)) as encoded:
            for piece, ids in encoded:
                if not parts:
                    key = key_of(piece.text, self._request["seed"])
                parts.append(ids)
                text_bytes += len(piece.text.encode())
                if not piece.last:
                    continue
                self._cursor = piece.cursor
                if len(parts) == 1 and not piece.text.strip():
                    self._empty += 1
                else:
                    tokens = np.concatenate([*parts, eos])
                    self._put(Document(key, self.documents, text_bytes, tokens, len(tokens)))
                parts, text_bytes = [], 0
                if self._writers["train"].tokens >= limit:
                    return
                if time.monotonic() - self._saved_s >= CHECKPOINT_S:
                    self._save()

    def _put(self, document: Document) -> None:
        for split, placed in self._splitter.place(document):
            self._writers[split].append(placed)
        self.documents += 1
        total = sum(writer.tokens for writer in self._writers.values())
        self._shown.tokens(self.documents, total, self._writers["train"].tokens)

    def _save(self) -> None:
        old, self._held_file = self._held_file, self._save_held()
        state = {
            "request": self._request,
            "eos": self._tokenizer.eos,
            "cursor": self._cursor,
            "documents": self.documents,
            "empty_documents": self._empty,
            "held_file": self._held_file,
            "held": {
                split: [[d.key, d.index, d.text_bytes, d.size] for d in held.documents]
                for split, held in self._splitter.held.items()
            },
            "splits": {split: writer.state() for split, writer in self._writers.items()},
        }
        write_json(self._directory / STATE, state)
        if old and old != self._held_file:
            (self._directory / old).unlink()
        self._saved_s = time.monotonic()

    def _save_held(self) -> str | None:
        held = {split: held.documents for split, held in self._splitter.held.items()}
        indices = {split: [document.index for document in documents] for split, documents in held.items()}
        documents = [document.payload for part in held.values() for document in part]
        if not documents or indices == self._held_indices:
            return self._held_file
        name = f"preparing_{self.documents}.npy"
        with (self._directory / name).open("wb") as file:
            np.save(file, np.concatenate(documents), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        self._held_indices = indices
        return name

    def _load_held(self, listed: dict[str, list[list[Any]]]) -> dict[str, list[Document]]:
        for path in self._directory.glob("preparing_*.npy"):
            if path.name != self._held_file:
                path.unlink()
        if self._held_file is None:
            return {}
        ids, start = np.load(self._directory / self._held_file, allow_pickle=False), 0
        held: dict[str, list[Document]] = {}
        for split, documents in listed.items():
            held[split] = []
            for key, index, text_bytes, size in documents:
                held[split].append(Document(key, index, text_bytes, ids[start : start + size], size))
                start += size
        return held

    def _finish(self) -> None:
        for split, held in self._splitter.held.items():
            for document in held.documents:
                self._writers[split].append(document)
        for split, writer in self._writers.items():
            if not writer.documents and (split == "train" or self._request[f"{split}_tokens"] > 0):
                raise ValueError(self._nothing(split))
            writer.close()
        manifest = {
            "format": FORMAT,
            "isoloco_version": __version__,
            "dtype": self._tokenizer.dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "eos": self._tokenizer.eos,
            "eos_id": self._tokenizer.eos_id,
            "tokenizer_files": {p.name: digest(p) for p in sorted((self._directory / TOKENIZER).iterdir())},
            "source": self._source.name,
            "tokenizer": self._spec,
            "request": self._request,
            "empty_documents": self._empty,
            "splits": {
                split: {
                    "documents": writer.documents,
                    "tokens": writer.tokens,
                    "text_bytes": writer.text_bytes,
                    "shards": writer.shards,
                }
                for split, writer in self._writers.items()
                if writer.documents
            },
        }
        write_json(self._directory / MANIFEST, seal(manifest))

    def _nothing(self, split: str) -> str:
        sizes = f"valid_tokens {self._request['valid_tokens']}, test_tokens {self._request['test_tokens']}"
        if split == "train":
            return f"{self._source.name} has no document to train on ({sizes}): give more text, or hold out less"
        return (
            f"{self._source.name} has no document in its {split} split ({sizes}): give more documents (in .txt, lines "
            f"<|endoftext|> separate them), {split}_tokens 1 for one document, or {split}_tokens 0 for none"
        )


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Generator[tuple[Piece, np.ndarray]]:
    """Pieces with their token ids, in order; encoded on all cores, a bounded number of batches ahead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ahead: deque[tuple[list[Piece], Future[list[np.ndarray]]]] = deque()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch in _batches(pieces):
            ahead.append((batch, pool.submit(tokenizer.encode, [piece.text for piece in batch])))
            if len(ahead) > cores + 1:
                done, ids = ahead.popleft()
                yield from zip(done, ids.result(), strict=True)
        for done, ids in ahead:
            yield from zip(done, ids.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
