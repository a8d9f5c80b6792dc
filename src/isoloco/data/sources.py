"""Where text comes from: the embedded corpus, local files, datasets of the Hugging Face Hub.

A source is a stream of documents that can go on from behind any of them.
"""

import contextlib
import glob
import hashlib
import io
import json
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..config import unknown
from .text import SEPARATOR, cut, lines_of, split_documents

KINDS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".jsonl.zst": "json", ".parquet": "parquet"}
CORPORA = {"sotu": "sotu.txt.xz"}
_BLOCK_DOCUMENTS = 256
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


class Interrupted(ValueError):
    """The source broke off for a reason that may pass (a disk, a network): what was prepared so far is kept."""


class Piece(NamedTuple):
    """A document, or part of a long one."""

    text: str
    last: bool
    """Whether the document ends here."""
    cursor: list[Any]
    """Where to go on behind this document, as JSON: a place of the source, and documents to pass over from there."""


class Source(Protocol):
    """A stream of documents."""

    name: str
    facts: dict[str, Any]
    """What the documents depend on: equal facts, equal documents."""

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents in their order, from the beginning or behind a cursor."""
        ...


def find_source(spec: str | Sequence[str], *, text_field: str) -> Source:
    """The source of this name: `corpus:NAME`, a file, a directory, a glob, or NAME[:CONFIG][@REVISION] on the Hub.

    Several files, directories and globs are one source, in this order.
    Raises ValueError for an unknown corpus, a file that is missing or of a type that is not read, an impossible name.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if len(specs) == 1 and specs[0].startswith("corpus:"):
        name = specs[0].removeprefix("corpus:")
        if name not in CORPORA:
            raise ValueError(unknown("corpus", name, CORPORA))
        return Corpus(name)
    if len(specs) == 1 and not _is_local(specs[0]):
        match = _HUB_NAME.fullmatch(specs[0])
        if not match:
            raise ValueError(f"source {specs[0]!r} is neither a file nor the name of a dataset on the Hub")
        return Hub(match["name"], text_field, config=match["config"], revision=match["revision"])
    try:
        return Files(" ".join(specs), [path for local in specs for path in _local_files(local)], text_field)
    except OSError as error:  # of a name that no file can have, or a directory that may not be read
        raise ValueError(f"source {' '.join(specs)}: cannot read {error.filename} ({error.strerror})") from None


def _is_local(spec: str) -> bool:
    return Path(spec).expanduser().exists() or any(c in spec for c in "*?[") or kind_of(Path(spec)) is not None


def _local_files(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and kind_of(p)]
        if not found:
            raise ValueError(f"directory {spec} holds no text: a source takes files of {', '.join(KINDS)}")
        return found
    found = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    files = [path for path in found if path.is_file()]
    if not files:
        raise ValueError(
            f"no file {spec}: a source takes corpus:sotu, files, a directory, a glob or a Hub dataset's name"
        )
    return files


def kind_of(path: Path) -> str | None:
    """Which reader takes a file, by its name; None for other types."""
    return next((kind for suffix, kind in KINDS.items() if path.name.lower().endswith(suffix)), None)


class Corpus:
    """The corpus that comes with the package."""

    def __init__(self, name: str) -> None:
        self.name = f"corpus:{name}"
        self._file = resources.files("isoloco.data") / "corpus" / CORPORA[name]
        self.facts = {"corpus": name, "blake2b": _digest(self._file.read_bytes())}

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, from the beginning or behind a cursor."""
        with (
            self._file.open("rb") as packed,
            lzma.open(packed) as raw,
            io.TextIOWrapper(raw, "utf-8", newline="\n") as file,
        ):
            yield from _number(split_documents(lines_of(file), SEPARATOR), 0, cursor[1] if cursor else 0)


class Files:
    """Local files, in the order of their names."""

    def __init__(self, name: str, paths: list[Path], text_field: str) -> None:
        self.name = name
        self.paths = paths
        self._field = text_field
        for path in paths:
            if not kind_of(path):
                raise ValueError(f"file type of {path} is not known: a source takes files of {', '.join(KINDS)}")
        stats = [(path.name, path.stat()) for path in paths]
        listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        self.facts = {
            "text_field": text_field,
            "files": len(paths),
            "bytes": sum(stat.st_size for _, stat in stats),
            "names_sizes_times_blake2b": _digest(json.dumps(listing).encode()),
        }

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, file by file, from the beginning or behind a cursor."""
        first, skip = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            with _naming(str(path), _reader_errors() if kind_of(path) != "text" else ()):
                yield from _number(self._documents(path), number, skip if number == first else 0)

    def _documents(self, path: Path) -> Iterator[tuple[str, bool]]:
        kind = kind_of(path)
        if kind == "text":
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                yield from split_documents(lines_of(file), SEPARATOR)
        elif path.stat().st_size:
            for text in (_json_lines if kind == "json" else _parquet)(path, self._field):
                yield from cut(text)


class Hub:
    """A dataset of the Hugging Face Hub (its train split), streamed; never all of it is on this machine."""

    def __init__(self, name: str, text_field: str, *, config: str | None = None, revision: str | None = None) -> None:
        self.name = name + (f":{config}" if config else "") + (f"@{revision}" if revision else "")
        self._dataset, self._field, self._config, self._revision = name, text_field, config, revision
        self.facts = {"dataset": self.name, "text_field": text_field}

    def read(self, cursor: list[Any] | None = None) -> Iterator[Piece]:
        """The documents, from the beginning or behind a cursor; a cursor holds on to the revision it was read from."""
        (revision, state), skip = cursor or ((None, None), 0)
        if revision is None and not Path(self._dataset).is_dir():
            revision = hub_revision(self._dataset, "dataset", revision=self._revision)
        name = f"dataset {self.name}"
        with _naming(name, _reader_errors()):
            options = {"name": self._config, "revision": revision}
            for before, texts in _blocks(name, self._dataset, self._field, state=state, **options):
                documents = (piece for text in texts for piece in cut(text or ""))
                yield from _number(documents, [revision, before], skip)
                skip = 0


def hub_revision(name: str, kind: str, *, revision: str | None = None) -> str | None:
    """The commit of a dataset or model on the Hub; ValueError, in one line and at once, where it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10).sha
    except (HTTPError, OSError, ValueError) as error:
        raise ValueError(f"cannot reach {kind} {name} on the Hugging Face Hub: {first_line(error)}") from None


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    # as lines and not by the reader of JSON, which takes no line whose fields differ from those of the first lines
    if path.name.lower().endswith(".zst"):
        _check_zst(path)
    number = 0
    files = [glob.escape(str(path))]
    for _, lines in _blocks(str(path), "text", "text", data_files=files, encoding="utf-8-sig"):
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield _field_of(line, text_field, f"{path}, line {number}")


def _field_of(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg} at character {error.pos})") from None
    if not isinstance(record, dict) or text_field not in record:
        fields = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
        raise ValueError(f"{where} has no field {text_field!r}: {fields} (text_field)")
    text = record[text_field]
    if not isinstance(text, str | None):
        raise ValueError(f"field {text_field!r} of {where} is {type(text).__name__}, not text (text_field)")
    return text or ""


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow.parquet

    fields = pyarrow.parquet.read_schema(path).names
    if text_field not in fields:
        raise ValueError(f"{path} has no field {text_field!r}: its fields are {', '.join(fields)} (text_field)")
    files = [glob.escape(str(path))]
    for _, texts in _blocks(str(path), "parquet", text_field, data_files=files, columns=[text_field]):
        yield from (text or "" for text in texts)


def _blocks(
    source: str, dataset: str, text_field: str, *, state: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[dict[str, Any], list[str | None]]]:
    """Texts of a streamed dataset, some hundred at a time, each block with the state to read it again."""
    import datasets
    import pyarrow.types

    with tempfile.TemporaryDirectory() as cache:  # datasets leaves lock files there, and nothing else when it streams
        try:
            stream: Any = datasets.load_dataset(dataset, split="train", streaming=True, cache_dir=cache, **options)
        except StopIteration:  # nothing in it
            return
        if stream.column_names is not None and text_field not in stream.column_names:
            fields = ", ".join(stream.column_names)
            raise ValueError(f"{source} has no field {text_field!r}: its fields are {fields} (text_field)")
        stream = stream.select_columns([text_field]).with_format("arrow")
        if state is not None:
            stream.load_state_dict(state)
        before = stream.state_dict()
        for table in stream.iter(batch_size=_BLOCK_DOCUMENTS):
            kind = table.schema.field(text_field).type
            if not (
                pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_null(kind)
            ):
                raise ValueError(f"field {text_field!r} of {source} holds {kind}, not text (text_field)")
            yield before, table[text_field].to_pylist()
            before = stream.state_dict()


def _number(documents: Iterable[tuple[str, bool]], place: Any, skip: int) -> Iterator[Piece]:
    done = 0
    for text, last in documents:
        if done >= skip:
            yield Piece(text, last, [place, done + last])
        done += last


def _check_zst(path: Path) -> None:
    """Raise ValueError for a Zstandard file that breaks off: reading would take that for its end."""
    import zstandard

    with path.open("rb") as file:
        data = file.read(2**20)
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while data and not frame.eof:
                frame.decompress(data)
                data = b"" if frame.eof else file.read(2**20)
            if not frame.eof:
                raise ValueError("the compressed file ends early")
            data = frame.unused_data or file.read(2**20)


def _reader_errors() -> tuple[type[Exception], ...]:
    import pyarrow
    import zstandard
    from huggingface_hub.errors import HTTPError

    return HTTPError, pyarrow.ArrowException, zstandard.ZstdError


@contextlib.contextmanager
def _naming(name: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn what readers raise for bad or unreachable data into one line that names it."""
    from gzip import BadGzipFile

    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {name}: it is not UTF-8 ({first_line(error)})") from None
    except (BadGzipFile, PermissionError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {name}: {first_line(error)}") from None
    except ValueError as error:
        known = name in str(error) and "\n" not in str(error)
        raise ValueError(str(error) if known else f"cannot read {name}: {first_line(error)}") from None
    except (OSError, *errors) as error:
        raise Interrupted(f"cannot read {name}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
