"""Where text comes from: the embedded corpus, local files, datasets of the Hugging Face Hub; read as a stream that can go on
from any document."""

import contextlib
import glob
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..config import unknown

SEPARATOR = "<|endoftext|>"  # a line of this between two documents of a text file
KINDS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".jsonl.zst": "json", ".parquet": "parquet"}
CORPORA = {"sotu": "sotu.txt.xz"}
PIECE_CHARS = 2**18  # longer documents are read and encoded in pieces of about this length, so that memory is bounded
_BLOCK_DOCUMENTS = 256
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


class Interrupted(ValueError):
    """The source broke off for a reason that may pass (a network): what was prepared so far is kept."""


class Piece(NamedTuple):
    """A document, or part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""
    cursor: list[Any]
    """Where to go on behind this document, as JSON: a place of the source, and the documents to pass over from there."""


class Source(Protocol):
    """A stream of documents."""

    name: str
    facts: dict[str, Any]
    """What the manifest says about it; equal facts, equal documents."""

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents in their order, from the beginning or behind a cursor."""
        ...


def find_source(spec: str, *, text_field: str) -> Source:
    """The source of this name: `corpus:NAME`, a file, a directory, a glob, or NAME[:CONFIG][@REVISION] on the Hub.

    Raises ValueError for an unknown corpus, a file that is missing or of a type that is not read, and an impossible name.
    """
    if spec.startswith("corpus:"):
        name = spec.removeprefix("corpus:")
        if name not in CORPORA:
            raise ValueError(unknown("corpus", name, CORPORA))
        return Corpus(name)
    path = Path(spec).expanduser()
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and kind_of(p)]
        if not found:
            raise ValueError(f"directory {spec} holds no text: a source takes files of {', '.join(KINDS)}")
        return Files(spec, found, text_field)
    if path.is_file():
        return Files(spec, [path], text_field)
    if any(char in spec for char in "*?["):
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]
        if not found:
            raise ValueError(f"no file matches {spec}")
        return Files(spec, found, text_field)
    match = _HUB_NAME.fullmatch(spec)
    if kind_of(path) or not match:
        raise ValueError(
            f"no file {spec}: a source takes corpus:sotu, files, a directory, a glob or a Hub dataset's name"
        )
    return Hub(match["name"], text_field, config=match["config"], revision=match["revision"])


def kind_of(path: Path) -> str | None:
    """Which reader takes a file, by its name; None for other types."""
    return next((kind for suffix, kind in KINDS.items() if path.name.lower().endswith(suffix)), None)


class Corpus:
    """The corpus that comes with the package."""

    def __init__(self, name: str) -> None:
        self.name = f"corpus:{name}"
        self._file = resources.files("isoloco.data") / "corpus" / CORPORA[name]
        self.facts = {"name": self.name, "blake2b": _digest(self._file.read_bytes())}

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, from the beginning or behind a cursor."""
        with self._file.open("rb") as packed, lzma.open(packed, "rt", encoding="utf-8", newline="\n") as file:
            yield from _count(_pieces(_lines(file), SEPARATOR), 0, cursor[1] if cursor else 0)


class Files:
    """Local files, in the order of their names."""

    def __init__(self, name: str, paths: list[Path], text_field: str) -> None:
        self.name = name
        self._paths = paths
        self._field = text_field
        for path in paths:
            if not kind_of(path):
                raise ValueError(f"file type of {path} is not known: a source takes files of {', '.join(KINDS)}")
        stats = [(path.name, path.stat()) for path in paths]
        listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        self.facts = {
            "name": name,
            "text_field": text_field,
            "files": len(paths),
            "bytes": sum(stat.st_size for _, stat in stats),
            "listing_blake2b": _digest(json.dumps(listing).encode()),
        }

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, file by file, from the beginning or behind a cursor."""
        first, skip = cursor or (0, 0)
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            with _naming(str(path)):
                yield from _count(self._documents(path), number, skip if number == first else 0)

    def _documents(self, path: Path) -> Iterator[tuple[str, bool]]:
        kind = kind_of(path)
        if kind == "text":
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                yield from _pieces(_lines(file), SEPARATOR)
        elif path.stat().st_size:
            if path.name.lower().endswith(".zst"):
                _check_zst(path)
            for _, texts in _blocks(str(kind), self._field, str(path), data_files=[glob.escape(str(path))]):
                for text in texts:
                    yield from _long(text)


class Hub:
    """A dataset of the Hugging Face Hub (its train split), streamed; never all of it is on this machine."""

    def __init__(self, name: str, text_field: str, *, config: str | None = None, revision: str | None = None) -> None:
        self.name = name + (f":{config}" if config else "") + (f"@{revision}" if revision else "")
        self._dataset, self._field, self._config, self._revision = name, text_field, config, revision
        self.facts = {"name": self.name, "text_field": text_field}

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, from the beginning or behind a cursor; a cursor keeps the revision it was read from."""
        revision, state, skip = cursor or (None, None, 0)
        if not Path(self._dataset).is_dir():
            revision = revision or hub_revision(self._dataset, "dataset", revision=self._revision)
        with _naming(f"dataset {self.name}", error=Interrupted):
            blocks = _blocks(self._dataset, self._field, f"dataset {self.name}", self._config, revision, state=state)
            for place, texts in blocks:
                documents = (piece for text in texts for piece in _long(text))
                for text, last, (_, count) in _count(documents, 0, skip):
                    yield Piece(text, last, [revision, place, count])
                skip = 0


def hub_revision(name: str, kind: str, *, revision: str | None = None) -> str | None:
    """The commit that a dataset or model of the Hub stands at; ValueError in one line where the Hub or it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10).sha
    except (HTTPError, OSError, ValueError) as error:
        raise ValueError(f"cannot reach {kind} {name} on the Hugging Face Hub: {first_line(error)}") from None


def _blocks(
    dataset: str,
    text_field: str,
    name: str,
    config: str | None = None,
    revision: str | None = None,
    *,
    state=None,
    **files,
) -> Iterator[tuple[Any, list[str | None]]]:
    """Documents of a streamed dataset, some hundred at a time, each block with the state to read it again."""
    import datasets
    import pyarrow.types

    try:
        stream = datasets.load_dataset(dataset, config, revision=revision, split="train", streaming=True, **files)
    except StopIteration:  # a file without a line
        return
    if stream.column_names is not None and text_field not in stream.column_names:
        raise ValueError(
            f"{name} has no field {text_field!r}: its fields are {', '.join(stream.column_names)} (text_field)"
        )
    stream = stream.select_columns([text_field]).with_format("arrow")
    if state is not None:
        stream.load_state_dict(state)
    before = stream.state_dict()
    for table in stream.iter(batch_size=_BLOCK_DOCUMENTS):
        kind = table.schema.field(text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_null(kind)):
            raise ValueError(f"field {text_field!r} of {name} holds {kind}, not text (text_field)")
        yield before, table[text_field].to_pylist()
        before = stream.state_dict()


def _count(documents: Iterable[tuple[str, bool]], place: Any, skip: int) -> Iterator[Piece]:
    done = 0
    for text, last in documents:
        done += last
        if done > skip or (done == skip and not last):
            yield Piece(text, last, [place, done])


def _lines(file: Iterable[str] | Any) -> Iterator[str]:
    while line := file.readline(PIECE_CHARS):  # a line may be endless
        yield line


def _long(text: str | None) -> Iterator[tuple[str, bool]]:
    if text is None or len(text) <= PIECE_CHARS:
        yield text or "", True
    else:
        yield from _pieces(_lines(io.StringIO(text, newline="\n")), None)


def _pieces(lines: Iterable[str], separator: str | None) -> Iterator[tuple[str, bool]]:
    """Documents as pieces of about PIECE_CHARS, cut where a line that does not begin with space follows one that is not
    blank: there byte-level tokenizers give the same tokens cut or whole. Without such a place, anywhere."""
    held: list[str] = []
    size, previous = 0, "\n"
    for line in lines:
        if separator and previous.endswith("\n") and line.rstrip("\r\n") == separator:
            yield "".join(held).removesuffix("\n").removesuffix("\r"), True
            held, size = [], 0
        else:
            good = not line[0].isspace() and previous.endswith("\n") and not previous.isspace()
            if held and ((size >= PIECE_CHARS and good) or size >= 4 * PIECE_CHARS):
                yield "".join(held), False
                held, size = [], 0
            held.append(line)
            size += len(line)
        previous = line
    if held:
        yield "".join(held), True


def _check_zst(path: Path) -> None:
    """Zstandard streams that break off read as if they ended; so look first (a thousandth of the time of encoding)."""
    import zstandard

    with path.open("rb") as file:
        data = file.read(2**20)
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while data and not frame.eof:
                frame.decompress(data)
                data = frame.unused_data or (b"" if frame.eof else file.read(2**20))
            if not frame.eof:
                raise ValueError("the compressed file ends early")
            data = data or file.read(2**20)


@contextlib.contextmanager
def _naming(name: str, *, error: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn what readers raise for bad or unreachable data into one line that names it."""
    import zstandard
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except UnicodeDecodeError as bad:
        raise ValueError(f"cannot read {name}: it is not UTF-8 ({first_line(bad)})") from None
    except (OSError, HTTPError) as bad:
        raise error(f"cannot read {name}: {first_line(bad)}") from None
    except (EOFError, zlib.error, zstandard.ZstdError, NotImplementedError) as bad:
        raise ValueError(f"cannot read {name}: {first_line(bad)}") from None
    except ValueError as bad:
        raise ValueError(str(bad) if name in str(bad) else f"cannot read {name}: {first_line(bad)}") from None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
