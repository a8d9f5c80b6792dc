"""The run directory and everything that a run tells: manifest, metrics.jsonl, TensorBoard, Weights & Biases, console.

``metrics.jsonl`` holds one JSON object a line. Two equal runs differ only in fields whose name ends in ``_s``.
Counting: ``step`` is the number of inner steps taken (the first one is 1), ``round`` the number of the round (the
first is 1; 0 is before any training), ``tokens`` those read by all workers together up to and with that step.

| kind | fields after ``kind, round, step`` |
|---|---|
| ``inner`` | worker, loss (nats per token), grad_norm (before clipping), lr, tokens |
| ``round`` | tokens, train_loss (mean over workers and steps), train_loss_spread (largest minus smallest worker), delta_norm (of the reduced delta), delta_cosine (mean over pairs of workers), dropped (workers left out), sent_bytes, received_bytes, inner_s, reduce_s, outer_s, eval_s, tokens_per_s, resources_s (mfu, peak_memory_bytes) |
| ``eval`` | tokens, split, loss (nats per token), perplexity, bits_per_byte (null where bytes are unknown), eval_s |
| ``spectra`` | matrices: name -> before, after (at most 64 singular values of the mean delta, evenly spaced in rank; after is null without a transform), stable_rank, rms_over_mean |
| other | one record for each event (``nonfinite``, ``checkpoint``, ...) with its own fields |

Every record ends with ``at_s``, seconds since 1970. JSON knows no NaN or infinity: such a number is written as null,
and ``nonfinite`` maps its place in the record to "nan", "inf" or "-inf"; `read_metrics` puts it back.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from . import console
from ._version import __version__
from .config import RunConfig, flat, identity
from .sinks import Sink, check_extras, open_sinks

__all__ = ["RunDir", "Tracker", "check_extras", "read_metrics"]

HEARTBEAT_EVERY_S = 5.0
ORDER = {
    "inner": "worker loss grad_norm lr tokens",
    "round": "tokens train_loss train_loss_spread delta_norm delta_cosine dropped sent_bytes received_bytes "
    "inner_s reduce_s outer_s eval_s tokens_per_s resources_s",
    "eval": "tokens split loss perplexity bits_per_byte eval_s",
    "spectra": "matrices",
}


class RunDir:
    """One run, one directory; ``run.json`` is its manifest and is only ever replaced whole.

    Manifest: state (running, finished, stopped, failed), error (one line or null), host, pid, started (ISO 8601),
    heartbeat_s (seconds since 1970), version, identity, command, config (path of config.yaml), summary.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def create(cls, config: RunConfig) -> RunDir:
        """A new directory: ``config.out_dir``, or runs/NAME-N with the next free N. ValueError where a run, or anything else, lies there."""
        path = _explicit(Path(config.out_dir)) if config.out_dir is not None else _numbered(Path("runs"), config.name)
        manifest = {
            "state": "running",
            "error": None,
            **_process(),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "heartbeat_s": time.time(),
            "version": __version__,
            "identity": identity(config),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "config": str((path / "config.yaml").absolute()),
            "summary": {},
        }
        try:
            (path / "run.json").touch(exist_ok=False)  # of two that found the same empty directory one goes on
        except FileExistsError:
            raise ValueError(f"out_dir {path} holds a run; choose another, or go on with it: --resume {path}") from None
        run_dir = cls(path, manifest)
        run_dir.update()
        return run_dir

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """A run that exists. ValueError where there is none."""
        path = Path(path)
        try:
            manifest = json.loads((path / "run.json").read_text("utf-8"))
        except OSError:
            raise ValueError(
                f"{path} is no run directory: it has no run.json that can be read; `isoloco train` makes them"
            ) from None
        except ValueError:
            raise ValueError(f"{path / 'run.json'} is damaged: it is not JSON; the run cannot be opened") from None
        if not isinstance(manifest, dict) or "state" not in manifest:
            raise ValueError(f"{path / 'run.json'} is not the manifest of a run: it has no state")
        return cls(path, manifest)

    def update(self, **fields: Any) -> None:
        """Set fields of the manifest and replace it on disk."""
        self.manifest.update(fields)
        write_whole(self.path / "run.json", json.dumps(_plain(self.manifest)[0], indent=1) + "\n")

    def heartbeat(self) -> None:
        """Say that the run is alive, every few seconds at most."""
        if time.time() - self.manifest["heartbeat_s"] >= HEARTBEAT_EVERY_S:
            self.update(heartbeat_s=time.time())

    def write_config(self, config_dict: dict[str, Any], sources: dict[str, str]) -> None:
        """config.yaml as resolved; ``sources`` says where each value that is not a default came from."""
        import yaml

        lines = [f"isoloco {__version__}, every option as it was resolved", "Not defaults:"]
        lines += [f"  {source}: {', '.join(keys)}" for source, keys in console.grouped(sources).items()]
        if not sources:
            lines[1] = "All of them are defaults."
        header = "".join("# " + line.replace("\n", " ") + "\n" for line in lines)
        body = yaml.safe_dump(config_dict, sort_keys=False, allow_unicode=True, width=110)
        write_whole(self.path / "config.yaml", header + body)


def _explicit(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = sorted(item.name for item in path.iterdir())
    except OSError as error:
        raise ValueError(f"out_dir {path} cannot be made or read: {error.strerror}") from None
    if "run.json" in held:
        raise ValueError(f"out_dir {path} holds a run; choose another, or go on with it: --resume {path}")
    if held:
        raise ValueError(f"out_dir {path} is not empty (it holds {held[0]}); choose a new or an empty directory")
    return path


def _numbered(parent: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"name: got {name!r}, takes a plain file name; use out_dir to say where the run goes")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        ends = [item.name[len(name) + 1 :] for item in parent.iterdir() if item.name.startswith(f"{name}-")]
        number = max((int(end) for end in ends if end.isdecimal()), default=0)
        while True:  # mkdir decides when two processes start at once
            number += 1
            try:
                (parent / f"{name}-{number}").mkdir()
                return parent / f"{name}-{number}"
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(
            f"no run directory can be made in {parent.absolute()}: {error.strerror}; see out_dir"
        ) from None


def _process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def write_whole(path: Path, text: str) -> None:
    """Replace a file by another one, whole: whoever reads it sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl (or of the run directory that holds it); a line that was torn at the end is left out.

    Errors: ValueError for a damaged line that is not the last one.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON; the file is damaged") from None
            break
        for place, what in record.pop("nonfinite", {}).items():
            _put(record, place.split("/"), float(what))
        records.append(record)
    return records


def _put(node: Any, place: list[str], value: float) -> None:
    for part in place[:-1]:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[int(place[-1]) if isinstance(node, list) else place[-1]] = value


def _plain(value: Any, place: str = "") -> tuple[Any, dict[str, str]]:
    """Plain JSON data (tensors and numpy scalars unwrapped), and where it had numbers that JSON does not know."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        pairs = {str(k): _plain(v, f"{place}/{k}" if place else str(k)) for k, v in value.items()}
        return {k: v for k, (v, _) in pairs.items()}, {p: w for _, found in pairs.values() for p, w in found.items()}
    if isinstance(value, list | tuple | set):
        items = [_plain(v, f"{place}/{i}" if place else str(i)) for i, v in enumerate(value)]
        return [v for v, _ in items], {p: w for _, found in items for p, w in found.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None, {place: str(value)}
    return (str(value) if isinstance(value, Path) else value), {}


class Metrics:
    """metrics.jsonl, appended to a line at a time; nothing stays in memory once it is written.

    A full disk tears no line and ends no run: what could not be written waits and is tried again with the next record.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._good_bytes = self._file.seek(0, os.SEEK_END)
        self.records = 0

    def append(self, record: dict[str, Any]) -> OSError | None:
        """Write a record; the error that kept it from being written, if there was one."""
        plain, nonfinite = _plain(record)
        if nonfinite:
            plain["nonfinite"] = nonfinite
        self._waiting += json.dumps(plain, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        self.records += 1
        return self.flush()

    def flush(self) -> OSError | None:
        """Write what waits."""
        try:
            left = memoryview(self._waiting)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._good_bytes)
            return error
        self._good_bytes += len(self._waiting)
        self._waiting = b""
        return None

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace the file by these records."""
        pairs = [_plain(record) for record in records]
        lines = [
            json.dumps({**plain, "nonfinite": found} if found else plain, ensure_ascii=False) for plain, found in pairs
        ]
        self._file.close()
        write_whole(self._path, "".join(line + "\n" for line in lines))
        self.__init__(self._path)
        self.records = len(records)

    def sync(self) -> None:
        """Force it to the disk, as is done before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


class Tracker:
    """Everything a run tells, in one place: each call writes metrics, feeds the sinks and shows what a person wants to see.

    Used as a context manager it leaves no run marked as running: an exception becomes the manifest's state and error.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        config: RunConfig,
        total_rounds: int,
        total_steps: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        resume: bool = False,
    ) -> None:
        self.run_dir, self.config = run_dir, config
        self.screen = console.Screen(total_steps=total_steps, total_rounds=total_rounds, quiet=quiet, stream=stream)
        path = run_dir.path / "metrics.jsonl"
        records = read_metrics(path) if resume else []
        self._metrics = Metrics(path)
        self._forget()
        self._started = time.monotonic()
        self._sinks: list[Sink] = open_sinks(run_dir, config, quiet=quiet)
        if resume:
            run_dir.update(state="running", error=None, heartbeat_s=time.time(), **_process())
            self._keep(records)

    # -- what the training calls ---------------------------------------------------------------------------------

    def header(self, rows: list[tuple[str, str]], sources: dict[str, str]) -> None:
        """The plan of the run, and where every value that is not a default came from."""
        values = flat(self.config)
        told = [
            (source, ", ".join(f"{key} {_short(values.get(key))}" for key in keys))
            for source, keys in console.grouped(sources).items()
        ]
        self.screen.header(
            f"isoloco {self.config.method}", [*rows, ("run directory", console.relative(self.run_dir.path))], told
        )

    def inner(
        self, *, round: int, step: int, worker: int, loss: float, grad_norm: float, lr: float, tokens: int
    ) -> None:
        """One inner step of one worker."""
        self._record(
            "inner", round=round, step=step, worker=worker, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens
        )

    def progress(
        self,
        *,
        round: int,
        step_in_round: int,
        steps_of_round: int,
        worker_index: int,
        workers: int,
        loss: float | None,
        tokens_per_s: float,
    ) -> None:
        """Where the run stands: ``step_in_round`` steps are done by the worker at ``worker_index`` (from 0) of ``workers``."""
        self._beat()
        of_round = (worker_index * steps_of_round + step_in_round) / workers
        fraction = min(((round - 1) * self.config.sync_every + of_round) / self.screen.total_steps, 1.0)
        where = f"step {step_in_round}/{steps_of_round}" + (
            f" of worker {worker_index + 1}/{workers}" if workers > 1 else ""
        )
        told = f"loss {loss:.4f}" if loss is not None else "loss -"
        self.screen.progress(
            fraction=fraction, round=round, detail=f"{where}  {told}  {console.count(tokens_per_s)} tokens/s"
        )

    def round(self, fields: dict[str, Any]) -> None:
        """One round, after its outer step."""
        self._record("round", **fields)

    def evaluation(
        self,
        *,
        round: int,
        step: int,
        tokens: int,
        split: str,
        loss: float,
        perplexity: float,
        bits_per_byte: float | None,
        eval_s: float,
    ) -> None:
        """One evaluation: a record and a printed line; the best so far is marked."""
        fields = {
            "tokens": tokens,
            "split": split,
            "loss": loss,
            "perplexity": perplexity,
            "bits_per_byte": bits_per_byte,
        }
        record = self._record("eval", round=round, step=step, **fields, eval_s=eval_s)
        best = record is self._best
        per_byte = f"  {bits_per_byte:.4f} bits/byte" if bits_per_byte is not None else ""
        text = f"round {round:>{len(str(self.screen.total_rounds))}}/{self.screen.total_rounds}  {console.count(tokens):>7} tokens  "
        text += f"{split} loss {loss:.4f}  perplexity {perplexity:.2f}{per_byte}  {console.duration(eval_s)}"
        self.screen.line(text + ("  best" if best else ""), style="bold green" if best else "")

    def spectra(self, *, round: int, step: int, matrices: dict[str, dict[str, Any]]) -> None:
        """Singular values of a few matrices of the mean delta."""
        self._record("spectra", round=round, step=step, matrices=matrices)

    def event(self, kind: str, **fields: Any) -> None:
        """Anything else that happened; non-finite numbers are told on standard error too."""
        self._record(kind, **fields)
        if kind == "nonfinite":
            self.warn("non-finite numbers: " + ", ".join(f"{name} {value}" for name, value in fields.items()))

    def warn(self, text: str) -> None:
        """One line on standard error."""
        self.screen.warn(text)

    def finish(
        self, summary: dict[str, Any], *, files: list[tuple[str, Path]], sample: str | None, next_commands: list[str]
    ) -> None:
        """The end: overview.png, the summary in the manifest, the final table, a sample. ``summary`` goes over what `figures` knows."""
        from .plots import overview

        figures = {**self.figures(), **summary}
        self.run_dir.update(summary=figures)
        picture = overview(self.run_dir.path)
        if self.run_dir.manifest["state"] == "running":
            self.run_dir.update(state="finished")
        self.screen.table(f"isoloco {self.config.method}: {self.run_dir.manifest['state']}", _final_rows(figures))
        shown = [*files, ("overview", picture)]
        self.screen.listing("Files", [(label, console.relative(path)) for label, path in shown])
        if sample:
            self.screen.line("\nSample", style="bold")
            self.screen.line(f"  {sample.strip()}")
        self.screen.line("")
        self.screen.listing("Next", [("", command) for command in next_commands])

    def figures(self) -> dict[str, Any]:
        """What the records add up to: losses best and last, perplexity, bits per byte, tokens, bytes, seconds."""
        best, last = self._best or {}, self._last or {}
        return {
            "best_loss": best.get("loss"),
            "best_step": best.get("step"),
            "last_loss": last.get("loss"),
            "last_step": last.get("step"),
            "perplexity": last.get("perplexity"),
            "bits_per_byte": last.get("bits_per_byte"),
            "tokens": self._tokens,
            "sent_bytes": self._sent_bytes,
            "received_bytes": self._received_bytes,
            "tokens_per_s": self._tokens / self._train_s if self._train_s else None,
            "wall_s": time.monotonic() - self._started,
        }

    # -- going on after a stop -----------------------------------------------------------------------------------

    @property
    def records(self) -> int:
        """Records written so far; a checkpoint keeps this number for `truncate`."""
        return self._metrics.records

    def sync(self) -> None:
        """Force metrics.jsonl to the disk, before a checkpoint that counts on it is complete."""
        self._metrics.sync()

    def truncate(self, step: int, *, records: int | None = None) -> None:
        """Forget what came after a checkpoint: all but the first ``records`` records, or those of a later step.

        In mid-round, workers that had their turn are further than the checkpoint's step, so that only ``records`` is exact.
        """
        kept = read_metrics(self.run_dir.path / "metrics.jsonl")
        kept = kept[:records] if records is not None else [r for r in kept if r.get("step", 0) <= step]
        for sink in self._sinks:
            sink.purge(step)
        self._keep(kept, after=step)

    def _keep(self, records: list[dict[str, Any]], *, after: float = math.inf) -> None:
        self._metrics.rewrite(records)
        self._forget()
        for record in records:
            self._note(record)
            if record.get("step", 0) > after:
                for sink in self._sinks:
                    sink.write(record)

    # -- inside --------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._best: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self._tokens, self._sent_bytes, self._received_bytes, self._train_s = 0, 0, 0, 0.0

    def _note(self, record: dict[str, Any]) -> None:
        if record["kind"] == "eval":
            self._last = record
            if math.isfinite(record["loss"]) and (self._best is None or record["loss"] < self._best["loss"]):
                self._best = record
        elif record["kind"] == "round":
            self._tokens = record.get("tokens", self._tokens)
            self._sent_bytes += record.get("sent_bytes") or 0
            self._received_bytes += record.get("received_bytes") or 0
            self._train_s += sum(record.get(name) or 0.0 for name in ("inner_s", "reduce_s", "outer_s"))

    def _record(self, kind: str, **fields: Any) -> dict[str, Any]:
        first = ["kind", "round", "step", *ORDER.get(kind, "").split()]
        fields = {"kind": kind, **fields}
        record = {name: fields[name] for name in first if name in fields}
        record |= {name: value for name, value in fields.items() if name not in record} | {
            "at_s": round(time.time(), 3)
        }
        if error := self._metrics.append(record):
            self.warn(
                f"metrics.jsonl could not be written ({error.strerror}); the run goes on, and they are kept in memory"
            )
        self._note(record)
        for sink in self._sinks:
            sink.write(record)
        self._beat()
        return record

    def _beat(self) -> None:
        try:
            self.run_dir.heartbeat()
        except OSError as error:
            self.run_dir.manifest["heartbeat_s"] = time.time()  # said once in a heartbeat's time, not at every step
            self.warn(f"{self.run_dir.path / 'run.json'} could not be written ({error.strerror}); the run goes on")

    def close(self) -> None:
        """End the bar, the sinks and the file. More than once is fine."""
        self.screen.pause()
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        self._metrics.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close()
        if error is not None and self.run_dir.manifest["state"] == "running":
            stopped = isinstance(error, KeyboardInterrupt)
            first = str(error).strip().split("\n")[0]
            told = f"{type(error).__name__}: {first}" if first else type(error).__name__
            self.run_dir.update(state="stopped" if stopped else "failed", error=None if stopped else told)


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list | tuple | None) else str(value)


def _final_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    def said(name: str, form: str) -> str:
        return format(figures[name], form) if figures.get(name) is not None else "-"

    def at(name: str) -> str:
        return f" (step {figures[name]})" if figures.get(name) is not None else ""

    sent, received = figures.get("sent_bytes") or 0, figures.get("received_bytes") or 0
    return [
        ("validation loss, best", said("best_loss", ".4f") + at("best_step")),
        ("validation loss, last", said("last_loss", ".4f") + at("last_step")),
        ("perplexity", said("perplexity", ".2f")),
        ("bits per byte", said("bits_per_byte", ".4f")),
        ("tokens", console.count(figures.get("tokens") or 0)),
        ("tokens/s", console.count(figures["tokens_per_s"]) if figures.get("tokens_per_s") else "-"),
        ("bytes exchanged", f"{console.size(sent)} sent, {console.size(received)} received"),
        ("wall time", console.duration(figures.get("wall_s") or 0.0)),
    ]
