"""Everything that a run tells, through one object: metrics.jsonl, TensorBoard, Weights & Biases, console, overview.png.

The fields of the records are described in `isoloco.metrics`.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

from . import console
from ._version import __version__
from .config import RunConfig, flat
from .metrics import Metrics, comparable, read_metrics, record
from .rundir import RunDir, process
from .sinks import Sink, check_extras, open_sinks

__all__ = ["RunDir", "Tracker", "check_extras", "comparable", "read_metrics"]


class Tracker:
    """Each call writes a record, feeds the sinks, says that the run is alive, and shows what a person wants to see.

    As a context manager it leaves no run marked as running: an exception becomes the manifest's state and error.
    ``quiet`` prints nothing but warnings. ``resume`` goes on with the records that are there (see `truncate`).
    Errors: ValueError where TensorBoard or Weights & Biases is asked for and missing.
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
        self._total_rounds, self._total_steps = total_rounds, total_steps
        try:
            self._sinks: list[Sink] = open_sinks(run_dir, config, quiet=quiet)
        except ValueError:
            if not resume:  # nothing has begun: nothing is left behind
                run_dir.discard()
            raise
        self.screen = console.Screen(quiet=quiet, stream=stream)
        self._metrics = Metrics(run_dir.path / "metrics.jsonl")
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._forget()
        if resume:
            run_dir.update(state="running", error=None, heartbeat_s=time.time(), **process())
            self._keep(read_metrics(run_dir.path))  # leaves out a line that was torn

    # What the training calls

    def header(self, rows: list[tuple[str, str]], sources: dict[str, str]) -> None:
        """The plan of the run, and where every value that is not a default came from."""
        values = flat(self.config)
        told = [
            (source, ", ".join(f"{key} {_short(values.get(key))}" for key in keys))
            for source, keys in console.grouped(sources).items()
        ]
        rows = [("method", self.config.method), *rows, ("run directory", console.relative(self.run_dir.path))]
        self.screen.header(f"isoloco {__version__}", rows, told)

    def inner(
        self, *, round: int, step: int, worker: int, loss: float, grad_norm: float, lr: float, tokens: int
    ) -> None:
        """One inner step of one worker."""
        fields = {"worker": worker, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens}
        self._record("inner", round=round, step=step, **fields)

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
        """Where the run stands: ``step_in_round`` steps of the worker at ``worker_index`` (from 0) of ``workers``.

        The loss that is shown is the mean over the last ``steps_of_round`` calls: workers take turns from one anchor,
        so that single losses jump up at each turn.
        """
        self._beat()
        if loss is not None:
            self._losses.append(loss)
            del self._losses[:-steps_of_round]
        of_round = (worker_index * steps_of_round + step_in_round) / workers
        fraction = min(((round - 1) * self.config.sync_every + of_round) / self._total_steps, 1.0)
        where = f"round {round}/{self._total_rounds}  step {step_in_round}/{steps_of_round}"
        where += f" of worker {worker_index + 1}/{workers}" if workers > 1 else ""
        told = f"loss {sum(self._losses) / len(self._losses):.4f}" if self._losses else "loss -"
        self.screen.progress(f"{where}  {told}  {console.count(tokens_per_s)} tokens/s", fraction=fraction)

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
        fields = {"tokens": tokens, "split": split, "loss": loss, "perplexity": perplexity}
        found = self._record("eval", round=round, step=step, **fields, bits_per_byte=bits_per_byte, eval_s=eval_s)
        parts = [
            f"round {round:>{len(str(self._total_rounds))}}/{self._total_rounds}",
            f"{console.count(tokens):>6} tokens",
            f"{split} loss {loss:.4f}",
            f"perplexity {perplexity:.2f}",
            *([f"{bits_per_byte:.4f} bits/byte"] if bits_per_byte is not None else []),
        ]
        self.screen.line("  ".join(parts), mark="best" if found is self._best else "")

    def spectra(self, *, round: int, step: int, matrices: dict[str, dict[str, Any]]) -> None:
        """Singular values of a few matrices of the mean delta."""
        self._record("spectra", round=round, step=step, matrices=matrices)

    def event(self, kind: str, **fields: Any) -> None:
        """Anything else that happened; non-finite numbers are told on standard error too."""
        self._record(kind, **fields)
        if kind == "nonfinite":
            self.warn("not finite: " + ", ".join(f"{name} {value}" for name, value in fields.items()))

    def warn(self, text: str) -> None:
        """One line on standard error."""
        self.screen.warn(text)

    def finish(
        self,
        summary: dict[str, Any],
        *,
        files: list[tuple[str, Path]],
        sample: str | None,
        next_commands: list[str],
    ) -> None:
        """The end: overview.png, summary and state in the manifest, the final table, a sample.

        ``summary`` is laid over what `figures` knows. The state becomes "finished" unless it was set before.
        """
        from .plots import overview

        figures = {**self.figures(), **summary}
        self.run_dir.update(summary=figures)
        try:
            picture = overview(self.run_dir.path)
            files = [*(file for file in files if Path(file[1]).absolute() != picture), ("overview", picture)]
        except OSError as error:
            self.warn(f"overview.png could not be written: {error.strerror}")
        if self.run_dir.manifest["state"] == "running":
            self.run_dir.update(state="finished")
        self.screen.table(f"Run {self.run_dir.manifest['state']}", _final_rows(figures))
        self.screen.listing("Files", [(label, console.relative(path)) for label, path in files])
        self.screen.listing("Next", [("", command) for command in next_commands])
        lines = (sample or "").strip().splitlines()
        shown = [line for line, before in zip(lines, ["", *lines], strict=False) if line.strip() or before.strip()]
        self.screen.listing("Sample", [("", line) for line in shown])  # of several blank lines, one

    def hear(self, told: list[tuple[str, dict[str, Any]]]) -> None:
        """Records of another process (see `Follower`)."""
        for kind, fields in told:
            getattr(self, kind)(**fields)

    def figures(self) -> dict[str, Any]:
        """What the records add up to: losses best and last, perplexity, bits per byte, tokens, bytes, seconds."""
        best, last = self._best or {}, self._last or {}
        train_s = sum(self._seconds[name] for name in ("inner_s", "reduce_s", "outer_s"))
        return {
            "split": last.get("split"),
            "valid_loss_best": best.get("loss"),
            "valid_loss_best_step": best.get("step"),
            "valid_loss_last": last.get("loss"),
            "valid_loss_last_step": last.get("step"),
            "perplexity": last.get("perplexity"),
            "bits_per_byte": last.get("bits_per_byte"),
            "tokens": self._tokens,
            "sent_bytes": self._bytes["sent_bytes"],
            "received_bytes": self._bytes["received_bytes"],
            "tokens_per_s": self._tokens / train_s if train_s else None,
            "wall_s": self._before_s + time.monotonic() - self._started,
        }

    # Going on after a stop

    @property
    def records(self) -> int:
        """Records written so far."""
        return self._metrics.records

    def mark(self) -> dict[str, Any]:
        """What a checkpoint keeps of the records so far, for `truncate`."""
        return self._metrics.mark()

    def sync(self) -> None:
        """Force metrics.jsonl to the disk, before a checkpoint that counts on it is complete."""
        self._metrics.sync()

    def truncate(self, step: int, *, records: int | None = None) -> None:
        """Forget what came after a checkpoint: all but the first ``records`` records, or those of a later step.

        Workers that had their turn in a round are further than the step of a checkpoint in mid-round, and an evaluation
        may come after a checkpoint of the same step, so that only ``records`` is exact.
        """
        kept = read_metrics(self.run_dir.path)
        kept = kept[:records] if records is not None else [r for r in kept if r.get("step", 0) <= step]
        if records is not None and (lost := records - len(kept)):
            self.warn(f"metrics.jsonl was lost: the run goes on without its {lost} records up to here")
        for sink in self._sinks:
            sink.purge(step)
        self._keep(kept)
        for found in kept:
            if found.get("step", 0) > step:
                self._feed(found)

    def _keep(self, records: list[dict[str, Any]]) -> None:
        self._metrics.rewrite(records)
        self._forget()
        for found in records:
            self._note(found)
        self._before_s = sum(self._seconds.values())

    def _forget(self) -> None:
        self._best: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self._tokens = 0
        self._bytes = {"sent_bytes": 0, "received_bytes": 0}
        self._seconds = {"inner_s": 0.0, "reduce_s": 0.0, "outer_s": 0.0, "eval_s": 0.0}
        self._before_s = 0.0

    # Inside

    def _note(self, found: dict[str, Any]) -> None:
        if found["kind"] == "eval":
            self._last = found
            if math.isfinite(found["loss"]) and (self._best is None or found["loss"] < self._best["loss"]):
                self._best = found
        elif found["kind"] == "round":
            self._tokens = found.get("tokens", self._tokens)
            for name in self._bytes:
                self._bytes[name] += found.get(name) or 0
            for name in self._seconds:
                self._seconds[name] += found.get(name) or 0.0

    def _record(self, kind: str, **fields: Any) -> dict[str, Any]:
        found = record(kind, fields)
        if error := self._metrics.append(found):
            told = f"metrics.jsonl cannot be written ({error.strerror})"
            self.warn(f"{told}; the run goes on, and its records wait in memory")
        self._note(found)
        self._feed(found)
        self._beat()
        return found

    def _feed(self, found: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(found)

    def _beat(self) -> None:
        try:
            self.run_dir.heartbeat()
        except OSError as error:
            self.warn(f"run.json cannot be written ({error.strerror}); the run goes on")

    def close(self) -> None:
        """End the bar, the sinks and the file. More than once is fine."""
        self.screen.pause()
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if error := self._metrics.close():
            self.warn(f"metrics.jsonl cannot be written ({error.strerror}): its last records are lost")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close()
        if error is not None and self.run_dir.manifest["state"] == "running":
            state: dict[str, Any] = {"state": "stopped"}
            if not isinstance(error, KeyboardInterrupt):
                first = str(error).strip().split("\n")[0]
                ours = isinstance(error, ValueError | MemoryError) and first
                state = {"state": "failed", "error": first if ours else f"{type(error).__name__}: {first}"}
            try:
                self.run_dir.update(**state)
            except OSError as unwritten:  # must not take the place of the error itself
                self.warn(f"run.json cannot be written ({unwritten.strerror}): it still says that the run is running")


class Follower:
    """The tracker of every process but the first: it keeps what it is told for the tracker of the first."""

    def __init__(self, run_dir: RunDir, *, rank: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self._told: list[tuple[str, dict[str, Any]]] = []

    def mark(self) -> dict[str, Any]:
        return {}

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """What was told since this was last asked."""
        told, self._told = self._told, []
        return told

    def inner(self, **fields: Any) -> None:
        self._told.append(("inner", fields))

    def event(self, kind: str, **fields: Any) -> None:
        self._told.append(("event", {"kind": kind, **fields}))

    def warn(self, text: str) -> None:
        console.Screen(quiet=True).warn(f"rank {self.rank}: {text}")

    def progress(self, **_: Any) -> None: ...

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list | tuple | None) else str(value)


def _final_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    def said(name: str, form: str = ".4f", *, at: str = "") -> str:
        step = f"  (step {figures[at]})" if at and figures.get(at) is not None else ""
        return f"{figures[name]:{form}}{step}" if figures.get(name) is not None else "-"

    split = {"valid": "validation", None: "validation"}.get(figures.get("split"), figures.get("split"))
    exchanged = [
        f"{console.size(figures[name])} {what}"
        for name, what in (
            ("wire_bytes_per_worker", "by each worker"),
            ("sent_bytes", "sent"),
            ("received_bytes", "received"),
        )
        if figures.get(name)
    ]
    return [
        (f"{split} loss, best", said("valid_loss_best", at="valid_loss_best_step")),
        (f"{split} loss, last", said("valid_loss_last", at="valid_loss_last_step")),
        ("perplexity", said("perplexity", ".2f")),
        ("bits per byte", said("bits_per_byte")),
        ("tokens", console.count(figures.get("tokens") or 0)),
        ("tokens/s", console.count(figures["tokens_per_s"]) if figures.get("tokens_per_s") else "-"),
        ("bytes exchanged", ", ".join(exchanged) or "none"),
        ("wall time", console.duration(figures.get("wall_s") or 0.0)),
    ]
