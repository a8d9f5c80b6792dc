"""metrics.jsonl: one JSON object a line, in the order in which things happened.

Every record begins with kind, round and step and ends with at_s. Two equal runs differ only in fields whose name ends
in ``_s``. ``step`` counts inner steps taken (the first is 1); ``round`` is the number of the round (the first is 1; 0
is before any training); ``tokens`` are those read by all workers together, up to and with that step.

    kind      field               meaning
    any       at_s                when it was written, seconds since 1970
              nonfinite           only where a number is NaN or infinite: JSON has no such numbers, so null stands in
                                  its place, and this maps the place ("loss", "matrices/NAME/before/3") to "nan",
                                  "inf" or "-inf"; `read_metrics` puts it back
    inner     worker              which worker took the step, from 0
              loss                nats per predicted token, of that worker's batch
              grad_norm           before clipping
              lr                  of the inner optimizer
              tokens
    round     tokens
              train_loss          mean over the workers and the steps of the round
              train_loss_spread   largest minus smallest over the workers
              delta_norm          of the reduced delta
              delta_cosine        mean over pairs of workers
              skipped_steps       inner steps skipped for a gradient that was not finite, all workers together
              dropped             workers left out, a list
              sent_bytes          by the first process, in this round
              received_bytes      by the first process, in this round
              link_bytes          sent out of its island, by all its members
              inner_s, reduce_s, outer_s, eval_s    seconds
              comm_s              seconds of these in which the first process exchanged bytes
              save_s              seconds that the training stood still for a checkpoint since the last round
              tokens_per_s        of the round
              workers, wait_s     elastic only: whose deltas count, seconds until all were there
              resources_s         mfu (null where the device's peak is unknown), peak_memory_bytes
    eval      tokens
              split               valid or test
              loss                nats per predicted token
              perplexity
              bits_per_byte       null where the bytes of the split are unknown
              eval_s              seconds
    spectra   matrices            name -> before, after: singular values of the mean delta, at most 64, evenly spaced in
                                  rank (after is null without a transform); stable_rank, rms_over_mean (of before)
    other     whatever it has     one record for each event: nonfinite, checkpoint, ...
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from .rundir import plain, write_whole

# fields in the order in which they are written, after kind, round and step
ORDER = {
    "inner": "worker loss grad_norm lr tokens",
    "round": "tokens train_loss train_loss_spread delta_norm delta_cosine skipped_steps dropped "
    "sent_bytes received_bytes link_bytes inner_s reduce_s outer_s comm_s eval_s save_s tokens_per_s resources_s",
    "eval": "tokens split loss perplexity bits_per_byte eval_s",
    "spectra": "matrices",
}


def record(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A record with its fields in their fixed order; those that the schema does not name come after."""
    fields = {"kind": kind, **fields}
    first = ["kind", "round", "step", *ORDER.get(kind, "").split()]
    ordered = {name: fields[name] for name in first if name in fields}
    return {**ordered, **fields, "at_s": round(time.time(), 3)}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, or of the run directory that holds it; a line that was torn at the end is left out.

    Errors: ValueError for a damaged line that is not the last one.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON; the file is damaged") from None
            break
        for place, what in found.pop("nonfinite", {}).items():
            _put(found, place.split("/"), float(what))
        records.append(found)
    return records


def check_records(path: Path, mark: dict[str, Any]) -> None:
    """ValueError where a metrics.jsonl does not begin with the records of a `Metrics.mark`; one that is gone passes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        found = hashlib.blake2b(b"".join(itertools.islice(file, mark["records"])), digest_size=16)
    if found.hexdigest() != mark["metrics"]:
        raise ValueError(
            f"{path} is damaged: its first {mark['records']} records are not those of the checkpoint; move it away to "
            "go on without them"
        )


def comparable(value: Any) -> Any:
    """A record (or any part of it) without the fields that differ between two equal runs."""
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if not name.endswith("_s")}
    return [comparable(part) for part in value] if isinstance(value, list) else value


def _put(node: Any, place: list[str], value: float) -> None:
    *parents, last = place
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(last) if isinstance(node, list) else last] = value


def _line(found: dict[str, Any]) -> bytes:
    nonfinite: dict[str, str] = {}
    data = plain(found, nonfinite=nonfinite)
    if nonfinite:
        data["nonfinite"] = nonfinite
    return json.dumps(data, allow_nan=False, ensure_ascii=False).encode() + b"\n"


class Metrics:
    """metrics.jsonl, open for appending; a record is handed to the system as soon as it is there.

    A full disk tears no line and ends no run: what could not be written waits and is tried again with the next record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self.records = len(read_metrics(self._path))
        self._hash = hashlib.blake2b(self._path.read_bytes() if self._path.exists() else b"", digest_size=16)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._good_bytes = self._file.seek(0, os.SEEK_END)
        self._waiting = b""

    def append(self, found: dict[str, Any]) -> OSError | None:
        """Write a record; returns the error that kept it from being written, if there was one."""
        line = _line(found)
        self._waiting += line
        self._hash.update(line)
        self.records += 1
        return self.flush()

    def flush(self) -> OSError | None:
        """Write what waits."""
        try:
            if self._file.seek(0, os.SEEK_END) != self._good_bytes:  # the last try got half of it onto the disk
                self._file.truncate(self._good_bytes)
            left = memoryview(self._waiting)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            return error
        self._good_bytes += len(self._waiting)
        self._waiting = b""
        return None

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace the file by these records."""
        self._file.close()
        write_whole(self._path, b"".join(map(_line, records)).decode())
        self._open()

    def mark(self) -> dict[str, Any]:
        """What there is so far: how many records, and their checksum. See `check_records`."""
        return {"records": self.records, "metrics": self._hash.hexdigest()}

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> OSError | None:
        """Write what waits, and close; returns the error with which records were lost, if there was one."""
        error = None if self._file.closed else self.flush()
        self._file.close()
        return error
