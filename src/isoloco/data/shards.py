"""Reading tokens: directories of memory-mapped `.npy` shards.

They hold the manifest of `isoloco prepare`, or are in the layout of the paper's authors.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import check_inside, check_name, check_tokenizer, digest, unseal
from .checked import scan_once

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
STATE = "preparing.json"  # of a preparation that is under way or was interrupted
FORMAT = "isoloco-shards-1"
SPLITS = ("train", "valid", "test")
DTYPES = ("uint16", "uint32")
_BLOCK_BYTES = 2**24  # what a scan holds in memory at a time


def open_data(path: str | Path) -> "Data":
    """Open a directory of shards: milliseconds and no memory, whatever its size; contents are looked at when asked for.

    A directory with `manifest.json` is what `isoloco prepare` wrote. One without is read as the authors' layout:
    `train_000000.npy`, `train_000001.npy`, ..., and the same for valid and test, one-dimensional uint16 (or uint32).
    Raises ValueError for a directory that is missing or holds no shards, and for a shard that is missing, truncated or
    not one-dimensional uint16 or uint32, by its name.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"no directory {directory}: data.path takes a directory of shards, from `isoloco prepare`")
    if (directory / MANIFEST).is_file():
        return _from_manifest(directory)
    if (directory / STATE).exists():
        raise ValueError(
            f"{directory} holds an unfinished preparation: run the same `isoloco prepare` again to finish it"
        )
    if (directory / "tokenizer").is_dir():
        raise ValueError(f"{directory / MANIFEST} is missing: {_again(directory)}")
    return _from_files(directory)


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: Path
    tokens: int
    dtype: str
    blake2b: str | None = None
    """Checksum of the whole file; None in the authors' layout, which has none."""
    max_id: int | None = None
    """Largest token id in it; None in the authors' layout."""

    @cached_property
    def array(self) -> np.ndarray:
        """The tokens, memory-mapped, [tokens]."""
        return _map(self.path)

    @cached_property
    def scanned(self) -> tuple[str, int]:
        """Checksum and largest token id, read from the file (of a large one, once: see `isoloco.data.checked`)."""
        return scan_once(self.path, scan)

    def largest_id(self) -> int:
        """Largest token id in it, -1 for none."""
        return self.scanned[1] if self.max_id is None else self.max_id


@dataclass(frozen=True)
class Split:
    """The tokens of one split: its shards, one after the other."""

    name: str
    shards: tuple[Shard, ...]
    documents: int | None = None
    text_bytes: int | None = None
    """UTF-8 bytes of the text that was tokenized; None where nobody counted."""
    starts: np.ndarray = field(init=False, repr=False)
    """Where each shard starts in the split, and where the last one ends, [shards + 1]."""

    def __post_init__(self) -> None:
        starts = np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)
        object.__setattr__(self, "starts", starts)

    @property
    def tokens(self) -> int:
        """How many tokens the split holds."""
        return int(self.starts[-1])

    def rows(self, seq_len: int) -> int:
        """How many whole rows of seq_len tokens it holds; row i is tokens i * seq_len to (i + 1) * seq_len - 1."""
        if seq_len < 1:
            raise ValueError(f"seq_len takes 1 or more, got {seq_len}")
        return self.tokens // seq_len

    def read(self, rows: np.ndarray, seq_len: int) -> "torch.Tensor":
        """The rows of these indices, int64 [len(rows), seq_len]; a row may begin in one shard and end in the next."""
        import torch

        out = np.empty((len(rows), seq_len), dtype=np.int64)
        last_row = self.rows(seq_len) - 1
        for target, row in zip(out, np.asarray(rows, dtype=np.int64).tolist(), strict=True):
            if not 0 <= row <= last_row:
                raise ValueError(f"split {self.name} has rows 0 to {last_row} of {seq_len} tokens, asked for row {row}")
            self._copy(row * seq_len, target)
        return torch.from_numpy(out)

    def _copy(self, start: int, target: np.ndarray) -> None:
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        filled = 0
        while filled < len(target):
            offset = start + filled - int(self.starts[number])
            part = self.shards[number].array[offset : offset + len(target) - filled]
            target[filled : filled + len(part)] = part
            filled += len(part)
            number += 1


@dataclass(frozen=True)
class Data:
    """A directory of shards."""

    path: Path
    splits: dict[str, Split]
    vocab_size: int | None = None
    """Number of token ids the tokenizer has; None in the authors' layout, which does not say (see `check_vocab`)."""
    eos_id: int | None = None
    """The token after every document; None in the authors' layout."""
    tokenizer_dir: Path | None = None
    """A Hugging Face tokenizer; None in the authors' layout."""
    manifest: dict[str, Any] | None = None

    def split(self, name: str) -> Split:
        """One split: train, valid or test. Raises ValueError where the data has none of that name."""
        if name not in self.splits:
            raise ValueError(f"{self.path} has no {name} split, only {', '.join(self.splits)}")
        return self.splits[name]

    def tokens(self, split: str) -> int:
        """How many tokens a split holds, 0 where there is none."""
        return self.splits[split].tokens if split in self.splits else 0

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text for each token (ends of documents counted as tokens), None where unknown.

        bits per byte = loss in nats / ln 2 / bytes per token.
        """
        part = self.split(split)
        return part.text_bytes / part.tokens if part.text_bytes is not None and part.tokens else None

    @cached_property
    def checksum(self) -> str:
        """The identity of the data: a hash over shard checksums, vocabulary and EOS, whatever the directory is called.

        Immediate with a manifest; in the authors' layout every shard is read once.
        """
        facts = {
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "splits": {
                name: [[s.dtype, s.tokens, s.blake2b or s.scanned[0]] for s in split.shards]
                for name, split in self.splits.items()
            },
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def largest_id(self) -> int:
        """The largest token id there is: immediate with a manifest, else every shard is read once."""
        return max(shard.largest_id() for shard in self._shards())

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError unless every token id is below vocab_size (of the model).

        Immediate with a manifest; in the authors' layout every shard is read once.
        """
        for shard in self._shards():
            largest = shard.largest_id()
            if largest >= vocab_size:
                raise ValueError(
                    f"{shard.path} holds token id {largest}, the model's vocabulary has {vocab_size} entries: "
                    "take a model with a larger one, or the data's own tokenizer"
                )

    def verify(self) -> None:
        """Compare shards and tokenizer with the manifest; ValueError names the first file that changed.

        They are read for it, but for large shards that were read before and that nobody wrote to since.
        """
        for name, wanted in (self.manifest or {}).get("tokenizer_files", {}).items():
            path = self.path / "tokenizer" / name
            if not path.is_file() or digest(path) != wanted:
                told = "changed since it was prepared" if path.is_file() else "is missing"
                raise ValueError(f"{path} {told}: {_again(self.path)}")
        for shard in self._shards():
            if shard.blake2b is not None and scan_once(shard.path, scan)[0] != shard.blake2b:
                raise ValueError(f"shard {shard.path} changed since it was prepared: {_again(self.path)}")

    def _shards(self) -> Iterator[Shard]:
        for split in self.splits.values():
            yield from split.shards


def scan(path: Path) -> tuple[str, int]:
    """blake2b of a shard's whole file and its largest token id (-1 for none), reading 16 MiB at a time."""
    array = _map(path)
    digest, largest = hashlib.blake2b(digest_size=32), -1
    with path.open("rb") as file:
        digest.update(file.read(path.stat().st_size - array.nbytes))  # the header
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype=array.dtype).max()))
    return digest.hexdigest(), largest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of prepared data. Raises ValueError for one that is not JSON or of another format."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON or UTF-8; nested beyond reason
        raise ValueError(f"{path} is not a manifest of `isoloco prepare` ({_first_line(error)})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{path} has format {found!r}, this version reads {FORMAT!r}: {_again(directory)}")
    return unseal(manifest, path, always=False)  # earlier manifests have none


def _from_manifest(directory: Path) -> Data:
    manifest = read_manifest(directory)
    try:
        splits = {}
        for name, facts in manifest["splits"].items():
            shards = []
            for listed in facts["shards"]:
                check_name(listed["file"], directory / MANIFEST)
                path, tokens, dtype = directory / listed["file"], listed["tokens"], manifest["dtype"]
                check_inside(path, directory)
                array = _map(path)
                if len(array) != tokens or array.dtype.name != dtype:
                    raise ValueError(f"shard {path} changed since it was prepared: {_again(directory)}")
                shards.append(Shard(path, tokens, dtype, listed["blake2b"], index(listed["max_id"])))
            splits[name] = Split(name, tuple(shards), index(facts["documents"]), index(facts["text_bytes"]))
        manifest.get("tokenizer_files", {}).items()  # for `Data.verify`
        vocab_size, eos_id = index(manifest["vocab_size"]), index(manifest["eos_id"])
    except (KeyError, TypeError, AttributeError) as error:
        path = directory / MANIFEST
        raise ValueError(f"{path} is not a manifest of `isoloco prepare` ({_first_line(error)})") from None
    tokenizer_dir = directory / "tokenizer" if (directory / "tokenizer").is_dir() else None
    if tokenizer_dir is not None:
        check_tokenizer(tokenizer_dir)
    return Data(directory, splits, vocab_size, eos_id, tokenizer_dir, manifest)


def _from_files(directory: Path) -> Data:
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(directory.glob("*.npy")):
        if match := re.fullmatch(rf"({'|'.join(SPLITS)})_(\d+)\.npy", path.name):
            found.setdefault(match[1], {})[int(match[2])] = path
    if not found.get("train"):
        raise ValueError(
            f"{directory} holds no data: neither {MANIFEST} (from `isoloco prepare`) nor train_000000.npy and so on"
        )
    splits = {}
    for name in (name for name in SPLITS if name in found):
        numbers = sorted(found[name])
        if numbers != list(range(len(numbers))):
            gap = min(set(range(len(numbers))) - set(numbers))
            raise ValueError(f"{directory} misses {name}_{gap:06d}.npy: it has {found[name][numbers[-1]].name}")
        for number in numbers:
            check_inside(found[name][number], directory)
        arrays = {number: _map(found[name][number]) for number in numbers}
        splits[name] = Split(name, tuple(Shard(found[name][n], len(a), a.dtype.name) for n, a in arrays.items()))
    if not splits["train"].tokens:
        raise ValueError(f"{directory} holds no data: its train shards are empty")
    return Data(directory, splits)


def _map(path: Path) -> np.ndarray:
    """The tokens of a shard, memory-mapped; ValueError for whatever is not a one-dimensional .npy of token ids."""
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        array = np.lib.format.open_memmap(path, mode="r")  # np.load's own, for .npy alone; refuses objects
    except FileNotFoundError:
        raise ValueError(f"shard {path} is missing") from None
    except (ValueError, EOFError, OSError) as error:  # numpy's, for a bad header or a file shorter than it says
        raise ValueError(f"shard {path} is corrupt or truncated ({_first_line(error)})") from None
    if array.ndim != 1 or array.dtype.name not in DTYPES:
        raise ValueError(
            f"shard {path} holds {array.dtype} in {array.ndim} dimensions: a shard has one, of uint16 or uint32"
        )
    if path.stat().st_size != array.offset + array.nbytes:
        raise ValueError(f"shard {path} is corrupt: it is longer than its header says")
    return array.view(np.ndarray)  # a plain view slices faster


def _again(directory: Path) -> str:
    return f"remove {directory} and prepare the data again"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
