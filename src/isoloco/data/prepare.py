"""`isoloco prepare`: text to shards of tokens, once, in bounded memory, on all cores, going on after interruptions."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..files import digest
from . import tokenizer as tokenizers
from .preparation import Preparation
from .progress import Progress
from .shards import FORMAT, MANIFEST, STATE, read_manifest
from .sources import Interrupted, Source, find_source

LOCK = "preparing.lock"
SHARD_TOKENS = 2**27


def prepare(
    *,
    out_dir: str | Path,
    source: str | Sequence[str],
    tokenizer: str,
    text_field: str = "text",
    valid_tokens: float = 0.05,
    test_tokens: float = 0.05,
    seed: int = 42,
    shard_tokens: int = SHARD_TOKENS,
    max_tokens: float | None = None,
    progress: bool = True,
) -> Path:
    """Turn a source of text (or several files, directories, globs) into shards with a manifest; return the directory.

    Whole documents go to valid, test or train by a hash of the seed and the text; the tokenizer's end of document
    follows each. `valid_tokens` and `test_tokens` below 1 are fractions of the documents; from 1 on they are numbers
    of tokens: the documents of the smallest (test: largest) hashes that reach it. The training split ends with the
    document that brings it to `max_tokens`. A directory that was prepared from the same settings is left as it is; one
    that was interrupted is finished, with the same bytes as if it had not been.

    Raises ValueError, in one line, for settings, a source or a tokenizer that do not work; then nothing is left behind.
    """
    found = find_source(source, text_field=text_field)
    request = _request(
        found,
        tokenizer=tokenizer,
        valid_tokens=valid_tokens,
        test_tokens=test_tokens,
        seed=seed,
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
    )
    directory = Path(out_dir)
    if not _is_done(directory, request) or (directory / STATE).exists():  # or it ended before it had tidied up
        _locked(directory, request, found, tokenizer, progress)
    return directory


def ensure(data: DataConfig, *, seed: int) -> Path:
    """The directory of shards that a configuration means: `data.path`, or its source prepared once and kept.

    Prepared data lies in $XDG_CACHE_HOME (or ~/.cache)/isoloco/data/NAME-HASH, a hash over all that changes it: the
    source's files, tokenizer, splits, seed. Several processes may ask at once: one prepares, the others wait.
    """
    if data.path is not None:
        return Path(data.path)
    directory, request, found, spec = _kept(data, seed=seed)
    if not _is_done(directory, request) or (directory / STATE).exists():
        _locked(directory, request, found, spec, progress=True)
    return directory


def is_prepared(data: DataConfig, *, seed: int) -> bool:
    """Whether `ensure` has nothing to do."""
    if data.path is not None:
        return True
    directory, request, *_ = _kept(data, seed=seed)
    return _is_done(directory, request)


def _kept(data: DataConfig, *, seed: int) -> tuple[Path, dict[str, Any], Source, str]:
    """Where the data of a source is kept, what is asked of it, the source and the tokenizer."""
    source, spec = data.source or "corpus:sotu", data.tokenizer or "train:bpe:2048"
    found = find_source(source, text_field=data.text_field)
    request = _request(
        found,
        tokenizer=spec,
        valid_tokens=data.valid_tokens,
        test_tokens=data.test_tokens,
        seed=seed,
        shard_tokens=SHARD_TOKENS,
        max_tokens=data.max_tokens,
    )
    key = hashlib.blake2b(json.dumps([FORMAT, request], sort_keys=True).encode(), digest_size=6).hexdigest()
    readable = "-".join(re.sub(r"\W+", "", name.rpartition("/")[2].lower())[:24] for name in (source, spec))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "isoloco" / "data" / f"{readable}-{key}", request, found, spec


def _request(source: Source, **settings: Any) -> dict[str, Any]:
    """Everything that the result depends on."""
    for name in ("valid_tokens", "test_tokens"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} takes a fraction below 1 or a number of tokens, got {settings[name]}")
    valid, test = settings["valid_tokens"], settings["test_tokens"]
    if valid < 1 and test < 1 and valid + test >= 1:
        raise ValueError(f"valid_tokens {valid} and test_tokens {test} leave nothing to train on")
    for name in ("shard_tokens", "max_tokens"):
        if settings[name] is not None and not settings[name] >= 1:
            raise ValueError(f"{name} takes 1 or more, got {settings[name]}")
    tokenizer = settings["tokenizer"]
    tokenizers.bpe_size(tokenizer)  # an impossible one is refused before anything is made
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    return {
        "source": source.facts,
        **settings,
        "tokenizer": path.name if path.is_file() else tokenizer,
        "tokenizer_file_blake2b": digest(path) if path.is_file() else None,
    }


def _is_done(directory: Path, request: dict[str, Any]) -> bool:
    """Whether the manifest is there. Raises ValueError for a preparation, finished or not, from other settings."""
    if (directory / MANIFEST).is_file():
        there = read_manifest(directory).get("request", {})
    elif (directory / STATE).is_file():
        there = json.loads((directory / STATE).read_text(encoding="utf-8"))["request"]
    else:
        return False
    for key, value in request.items():
        if there.get(key) != value:
            changed = f"{key} was {json.dumps(there.get(key))}, now {json.dumps(value)}"
            raise ValueError(
                f"{directory} holds data of other settings ({changed}): choose another, or remove that one"
            )
    return (directory / MANIFEST).is_file()


def _locked(directory: Path, request: dict[str, Any], source: Source, spec: str, progress: bool) -> None:
    """Prepare while no other process does; on a user's mistake nothing stays behind."""
    from filelock import FileLock, Timeout

    made = [path for path in (directory, *directory.parents) if not path.exists()]
    if not made and not directory.is_dir():
        raise ValueError(f"{directory} is a file: out_dir takes a directory")
    ours = {LOCK, STATE, f"{STATE}.partial"}
    if not made and not (directory / STATE).exists() and any(path.name not in ours for path in directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no preparation: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process prepares {directory}: waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        if not _is_done(directory, request):  # it may be, by the process that had the lock before
            directory.mkdir(exist_ok=True)
            _run(directory, request, source, spec, progress, made)
        for path in [*directory.glob("preparing_*.npy"), directory / LOCK, directory / STATE]:
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def _run(directory: Path, request: dict[str, Any], source: Source, spec: str, progress: bool, made: list[Path]) -> None:
    """Prepare; on a user's mistake remove what is in the directory, and the directories that were ``made`` for it."""
    preparation = None
    try:
        with tokenizers.own_threads(), Progress(progress, request["max_tokens"]) as shown:
            preparation = Preparation(directory, request, source, spec, shown)
            preparation.run()
    except ValueError as error:
        if isinstance(error, Interrupted) and preparation is not None and preparation.documents:
            raise Interrupted(f"{error}; the same command goes on from here") from None
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in made:
            with contextlib.suppress(OSError):  # it holds something of somebody else's by now
                path.rmdir()
        raise
