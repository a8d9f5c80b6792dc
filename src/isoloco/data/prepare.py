"""`isoloco prepare`: text to shards of tokens, once; in bounded memory, on all cores, and going on where it was interrupted."""

import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..config import DataConfig
from . import tokenizer as tokenizers
from .progress import Progress
from .shards import FORMAT, MANIFEST, SPLITS, STATE
from .sources import Interrupted, Piece, Source, find_source
from .tokenizer import Tokenizer
from .writer import Document, Held, ShardWriter, write_json

CHECKPOINT_S = 10.0  # how much work an interruption may cost
BATCH_CHARS = 2**18  # text that a thread encodes at a time
TRAINING_BYTES = 2**28  # text that train:bpe reads at most
BYTES_PER_TOKEN = 8  # above what tokens hold on average, to keep held-out text out of the tokenizer's training
LOCK = "preparing.lock"
_TOKENIZER = "tokenizer"


def prepare(
    *,
    out_dir: str | Path,
    source: str,
    tokenizer: str,
    text_field: str = "text",
    valid_tokens: float = 0.05,
    test_tokens: float = 0.05,
    seed: int = 42,
    shard_tokens: int = 2**27,
    max_tokens: float | None = None,
    progress: bool = True,
) -> Path:
    """Turn a source of text into a directory of shards with a manifest, and return the directory.

    Whole documents go to valid, test or train by a hash of the seed and the text; each is followed by the tokenizer's end of
    document. `valid_tokens` and `test_tokens` below 1 are fractions of the documents, from 1 on they are numbers of tokens: the
    documents of the smallest (test: largest) hashes that reach it. `max_tokens` ends the training split at the document that
    reaches it. A directory that is prepared already from the same settings is left as it is; one that was interrupted is
    finished, with the same bytes as if it had not been.

    Raises ValueError, in one line, for settings, a source or a tokenizer that do not work; then nothing is left behind.
    """
    directory = Path(out_dir)
    found = find_source(source, text_field=text_field)
    for name, value in (("valid_tokens", valid_tokens), ("test_tokens", test_tokens)):
        if not value >= 0:
            raise ValueError(f"{name} takes a fraction below 1 or a number of tokens, got {value}")
    if valid_tokens < 1 and test_tokens < 1 and valid_tokens + test_tokens >= 1:
        raise ValueError(f"valid_tokens {valid_tokens} and test_tokens {test_tokens} leave nothing to train on")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens takes 1 or more, got {shard_tokens}")
    if max_tokens is not None and not max_tokens >= 1:
        raise ValueError(f"max_tokens takes 1 or more, got {max_tokens}")
    request = {
        "source": found.facts,
        "tokenizer": tokenizer,
        "valid_tokens": valid_tokens,
        "test_tokens": test_tokens,
        "seed": seed,
        "shard_tokens": shard_tokens,
        "max_tokens": max_tokens,
    }
    if _is_done(directory, request):
        return directory
    tokenizers.bpe_size(tokenizer)  # an impossible one is refused before anything is made
    return _locked(directory, request, found, progress)


def ensure(data: DataConfig, *, seed: int) -> Path:
    """The directory of shards that a configuration means: `data.path`, or its source prepared once and kept.

    Prepared data lies in $XDG_CACHE_HOME (or ~/.cache) /isoloco/data/NAME-HASH, the hash being over everything that changes it
    (the source's files, tokenizer, splits, seed). Several processes may ask at once: one prepares, the others wait.
    """
    if data.path is not None:
        return Path(data.path)
    source, spec = data.source or "corpus:sotu", data.tokenizer or "train:bpe:2048"
    facts = find_source(source, text_field=data.text_field).facts
    vocabulary = _tokenizer_file_digest(spec)
    key = [FORMAT, {**facts, "name": None}, spec, vocabulary, data.valid_tokens, data.test_tokens, seed]
    if "listing_blake2b" not in facts:
        key.append(facts["name"])
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
    readable = "-".join(re.sub(r"[^a-z0-9]+", "", part.lower())[-24:] for part in (Path(source).name, spec))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return prepare(
        out_dir=cache / "isoloco" / "data" / f"{readable}-{digest}",
        source=source,
        tokenizer=spec,
        text_field=data.text_field,
        valid_tokens=data.valid_tokens,
        test_tokens=data.test_tokens,
        seed=seed,
    )


def _tokenizer_file_digest(spec: str) -> str | None:
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else None


def _is_done(directory: Path, request: dict[str, Any]) -> bool:
    if not (directory / MANIFEST).is_file():
        return False
    _compare(directory, json.loads((directory / MANIFEST).read_text(encoding="utf-8")).get("request", {}), request)
    return True


def _compare(directory: Path, there: dict[str, Any], request: dict[str, Any]) -> None:
    for key, value in request.items():
        if there.get(key) != value:
            raise ValueError(
                f"{directory} holds data of other settings ({key} {there.get(key)!r}, now {value!r}): "
                "choose another directory, or remove this one"
            )


def _locked(directory: Path, request: dict[str, Any], source: Source, progress: bool) -> Path:
    from filelock import FileLock

    existed = directory.exists()
    if existed and not (directory / STATE).exists() and any(p.name != LOCK for p in directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no preparation: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / LOCK):
        if _is_done(directory, request):  # by the process that had the lock before
            return directory
        try:
            with tokenizers.own_threads(), Progress(progress, request["max_tokens"]) as shown:
                _Preparation(directory, request, source, shown).run()
        except Interrupted:
            raise
        except ValueError:
            for path in directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not existed:
                directory.rmdir()
            raise
        (directory / LOCK).unlink(missing_ok=True)
    return directory


class _Preparation:
    """One preparation: a fold over the documents of the source whose state is saved every few seconds."""

    def __init__(self, directory: Path, request: dict[str, Any], source: Source, shown: Progress) -> None:
        self._directory, self._request, self._source, self._shown = directory, request, source, shown
        state_path = directory / STATE
        state = json.loads(state_path.read_text(encoding="utf-8")) if state_path.exists() else {"request": request}
        _compare(directory, state["request"], request)
        if "tokenizer_eos" in state:
            self._tokenizer = tokenizers.reload(directory / _TOKENIZER, state["tokenizer_eos"])
        else:
            self._tokenizer = self._make_tokenizer()
        self._cursor: list[Any] | None = state.get("cursor")
        self._documents: int = state.get("documents", 0)
        self._empty: int = state.get("empty_documents", 0)
        self._held_file: str | None = state.get("held_file")
        self._held = self._load_held(state)
        self._writers = {
            split: ShardWriter(
                directory,
                split,
                self._tokenizer.dtype,
                request["shard_tokens"],
                state=state.get("splits", {}).get(split),
            )
            for split in SPLITS
        }
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
        size = tokenizers.bpe_size(self._request["tokenizer"])
        self._shown.phase("training the tokenizer" if size else "loading the tokenizer")
        if size:
            made = tokenizers.train_bpe(self._training_text(), size)
        else:
            made = tokenizers.load_tokenizer(self._request["tokenizer"])
        shutil.rmtree(self._directory / _TOKENIZER, ignore_errors=True)
        made.save(self._directory / _TOKENIZER)
        return made

    def _training_text(self) -> Iterator[str]:
        """Text of training documents. How many tokens a document has is not known yet: what could come to be held out is not read."""
        sizes = {name: self._request[name] for name in ("valid_tokens", "test_tokens")}
        sizes = {name: size * BYTES_PER_TOKEN if size >= 1 else size for name, size in sizes.items()}
        held = _make_held(sizes)
        pieces, key, read = [], 0.0, 0
        for piece in self._source.read():
            pieces.append(piece.text)
            key = key if len(pieces) > 1 else self._key(piece.text)
            if not piece.last:
                continue
            size = sum(len(text.encode()) for text in pieces)
            for split, document in _place(Document(key, 0, size, pieces, size), sizes, held):
                if split == "train":
                    yield from document.payload
                    read += document.size
            pieces = []
            if read >= TRAINING_BYTES:
                return
        if not read:
            raise ValueError(_nothing_left(self._request, "train"))

    def _key(self, text: str) -> float:
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(self._request["seed"]).encode()).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def _read(self) -> None:
        self._shown.phase("tokenizing")
        limit = self._request["max_tokens"] or float("inf")
        train = self._writers["train"]
        eos = np.array([self._tokenizer.eos_id], dtype=self._tokenizer.dtype)
        parts, key, size = [], 0.0, 0
        if train.tokens >= limit:
            return
        for piece, ids in _encoded(self._source.read(self._cursor), self._tokenizer):
            key = key if parts else self._key(piece.text)
            parts.append(ids)
            size += len(piece.text.encode())
            if not piece.last:
                continue
            self._cursor = piece.cursor
            if len(parts) == 1 and not piece.text.strip():
                self._empty += 1
            else:
                document = np.concatenate([*parts, eos])
                self._put(Document(key, self._documents, size, document, len(document)))
                self._documents += 1
            parts, size = [], 0
            if train.tokens >= limit:
                return
            if time.monotonic() - self._saved_s >= CHECKPOINT_S:
                self._save()

    def _put(self, document: Document) -> None:
        for split, placed in _place(document, self._request, self._held):
            self._writers[split].append(placed)
        self._shown.update(self._documents + 1, {name: writer.tokens for name, writer in self._writers.items()})

    def _save(self) -> None:
        """Everything it takes to go on, first the tokens and then the one file that says how many of them count."""
        old = self._held_file
        self._held_file = self._save_held()
        state = {
            "request": self._request,
            "tokenizer_eos": self._tokenizer.eos,
            "cursor": self._cursor,
            "documents": self._documents,
            "empty_documents": self._empty,
            "held_file": self._held_file,
            "held": {
                split: [[d.key, d.index, d.text_bytes, d.size] for d in held.documents]
                for split, held in self._held.items()
            },
            "splits": {split: writer.state() for split, writer in self._writers.items()},
        }
        write_json(self._directory / STATE, state)
        if old and old != self._held_file:
            (self._directory / old).unlink(missing_ok=True)
        self._saved_s = time.monotonic()

    def _save_held(self) -> str | None:
        documents = [document.payload for held in self._held.values() for document in held.documents]
        if not documents:
            return None
        name = f"preparing_{self._documents}.npy"
        with (self._directory / name).open("wb") as file:
            np.save(file, np.concatenate(documents), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        return name

    def _load_held(self, state: dict[str, Any]) -> dict[str, Held]:
        for path in self._directory.glob("preparing_*.npy"):
            if path.name != self._held_file:
                path.unlink()
        documents: dict[str, list[Document]] = {}
        if self._held_file:
            ids, start = np.load(self._directory / self._held_file, allow_pickle=False), 0
            for split, listed in state["held"].items():
                for key, index, text_bytes, size in listed:
                    document = Document(key, index, text_bytes, ids[start : start + size], size)
                    documents.setdefault(split, []).append(document)
                    start += size
        return _make_held(self._request, documents)

    def _finish(self) -> None:
        for split, held in self._held.items():
            for document in held.documents:
                self._writers[split].append(document)
        for split, writer in self._writers.items():
            wanted = split == "train" or self._request[f"{split}_tokens"] > 0
            if wanted and not writer.documents:
                raise ValueError(_nothing_left(self._request, split))
            writer.close()
        manifest = {
            "format": FORMAT,
            "isoloco_version": __version__,
            "dtype": self._tokenizer.dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "eos": self._tokenizer.eos,
            "request": self._request,
            "empty_documents": self._empty,
            "tokenizer_blake2b": _tokenizer_file_digest(str(self._directory / _TOKENIZER)),
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
        write_json(self._directory / MANIFEST, manifest)
        for path in [self._directory / STATE, *self._directory.glob("preparing_*.npy")]:
            path.unlink()


def _make_held(sizes: dict[str, Any], documents: dict[str, list[Document]] | None = None) -> dict[str, Held]:
    return {
        split: Held(sizes[f"{split}_tokens"], smallest=split == "valid", documents=(documents or {}).get(split))
        for split in ("valid", "test")
        if sizes[f"{split}_tokens"] >= 1
    }


def _place(document: Document, sizes: dict[str, Any], held: dict[str, Held]) -> Iterator[tuple[str, Document]]:
    """Where a document goes, and those that it drives out of a split that is full; nothing while it is held."""
    valid, test = sizes["valid_tokens"], sizes["test_tokens"]
    if valid < 1 and document.key < valid:
        yield "valid", document
        return
    for left in held["valid"].offer(document) if "valid" in held else [document]:
        if test < 1 and left.key >= 1 - test:
            yield "test", left
        else:
            for out in held["test"].offer(left) if "test" in held else [left]:
                yield "train", out


def _nothing_left(request: dict[str, Any], split: str) -> str:
    sizes = f"valid_tokens {request['valid_tokens']}, test_tokens {request['test_tokens']}"
    if split == "train":
        return f"{request['source']['name']} has no document to train on ({sizes}): give more text, or hold out less"
    return (
        f"{request['source']['name']} has no document in its {split} split ({sizes}): give more documents "
        f"(a line <|endoftext|> separates them in .txt), {split}_tokens 1 for one document, or 0 for none"
    )


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Pieces with their token ids, in order; encoded on all cores, a bounded number of batches ahead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ahead: deque[tuple[list[Piece], Any]] = deque()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch in _batches(pieces):
            ahead.append((batch, pool.submit(tokenizer.encode, [piece.text for piece in batch])))
            if len(ahead) > cores + 1:
                done, future = ahead.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in ahead:
            yield from zip(done, future.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, chars = [], 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
