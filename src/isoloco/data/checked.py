"""What was read of large files, remembered as long as they stay as they are: a start need not read all data again."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from operator import index
from pathlib import Path

REMEMBER_FROM_BYTES = 2**26  # smaller ones are read in a moment, at every start
_SETTLED_NS = 2 * 10**9  # a file that was just written may change again within a tick of the file system's clock


def scan_once(path: Path, scan: Callable[[Path], tuple[str, int]]) -> tuple[str, int]:
    """``scan(path)``, a checksum and a largest token id; of a large file what it said before, if nobody wrote to it.

    Size, inode and both times of the file say so. Notes lie in $XDG_CACHE_HOME (or ~/.cache)/isoloco/checked; where
    that cannot be written, nothing is remembered.
    """
    found = path.stat()
    if found.st_size < REMEMBER_FROM_BYTES:
        return scan(path)
    stamp = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
    note = _note(path)
    known = _read(note)
    if known is not None and known[0] == stamp:
        return known[1], known[2]
    settled = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS
    digest, largest = scan(path)
    if settled:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            partial = note.with_name(f"{note.name}.{os.getpid()}")  # several processes may write the same
            partial.write_text(json.dumps([stamp, digest, largest, str(path.resolve())]) + "\n", encoding="utf-8")
            os.replace(partial, note)
    return digest, largest


def _note(path: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "isoloco" / "checked" / f"{name}.json"


def _read(note: Path) -> tuple[list[int], str, int] | None:
    """Stamp, checksum and largest id of a note; None where there is none that can be read."""
    try:
        stamp, digest, largest, _ = json.loads(note.read_text(encoding="utf-8"))
        return list(stamp), str(digest), index(largest)
    except (OSError, ValueError, TypeError):
        return None
