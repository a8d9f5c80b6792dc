"""Train a language model from a RunConfig: check everything, then the loop over rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from . import model as models
from . import resume as resuming
from .comm import Comm, connect
from .config import RunConfig, flat
from .console import relative
from .data.feed import checksum
from .evaluate import evaluate_data
from .launch import traced
from .leave import BEST, export_best, leave_model
from .memory import remedies, told_what_to_lower
from .outline import check_anchor, check_together, get_ready, prepare_run
from .parts import Parts, origins
from .rundir import check_place
from .simulate import load_anchor
from .tracking import RunDir, Tracker, read_metrics

AGREE_EVERY_ROUNDS = 10  # that all processes have the same anchor


@dataclass
class TrainResult:
    """What a run came to. Losses are mean nats per predicted token."""

    run_dir: Path
    state: str  # finished | stopped
    stopped_by: str  # empty | interrupt | requeue
    train_losses: list[float]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]] = field(repr=False)

    @property
    def best_loss(self) -> float:
        """Lowest validation loss."""
        return min(e["loss"] for e in self.evaluations)

    @property
    def final_loss(self) -> float:
        """Validation loss of the last anchor."""
        return self.evaluations[-1]["loss"]


def train(
    config: RunConfig,
    *,
    sources: dict[str, str] | None = None,
    resume: str | Path | None = None,
    resume_from_previous: bool = False,
    quiet: bool = True,
    stop: Callable[[], str | bool] = lambda: False,
    observe: Callable[..., None] | None = None,
    command: str | None = None,
    profile: bool = False,
) -> TrainResult:
    """Train by ``config`` into a new run directory, or go on with a run.

    Args:
        sources: where values came from, for the header.
        resume: a run directory to go on with; ``config`` may differ from its own in what does not affect the result,
            and in the budget. "auto": the newest run of the same identity that has not ended (from its start where it
            has no checkpoint yet), or a new one.
        resume_from_previous: from its last checkpoint but one.
        quiet: print nothing but warnings.
        stop: asked before every inner step; once it is true the state is saved and the run ends, with the model and
            the figures of the last finished round, or at once where it says "requeue".
        observe: ``observe(phase, **info)`` hears every phase.
        command: kept in the manifest.
        profile: write a trace of the second round from here (the only one, where there is one) to profile.json.gz.

    Installs no signal handlers and exits nothing.

    Raises:
        ValueError: bad config or data, before anything is written.
    """
    comm = connect(config)
    try:
        return start(
            config, comm, sources=sources or {}, resume=resume, previous=resume_from_previous,
            quiet=quiet, stop=stop, observe=observe, command=command, profile=profile,
        )  # fmt: skip
    finally:
        comm.close()


def start(
    config: RunConfig,
    comm: Comm,
    *,
    sources: dict[str, str],
    resume: str | Path | None,
    previous: bool,
    run: type[Run] | None = None,
    **launch: Any,
) -> TrainResult:
    """Check the config with all processes, build the run or take it up (``run``: its class), go through it."""
    check_together(config, comm)
    if resume is None:
        comm.from_leader(lambda: check_place(config))
    comm.from_leader(lambda: get_ready(config))  # one process prepares the data that all read
    hosted = 1 if config.is_dp else len(comm.hosted(config.workers))
    prepared = comm.together(lambda: prepare_run(config, hosted=hosted))
    sources = origins(config, prepared.config, sources)
    resumed = None
    if resume == "auto":
        resumed = comm.together(lambda: resuming.resume_newest(prepared, comm))
    elif resume is not None:
        resumed = comm.together(lambda: resuming.resume(resume, prepared, comm, previous=previous))
    comm.from_leader(lambda: [data.verify() for data in prepared.data] and None)
    torch.set_num_threads(prepared.config.compute.threads or torch.get_num_threads())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or prepared.config.compute.deterministic)
    try:
        with contextlib.ExitStack() as held, told_what_to_lower(remedies(prepared.config)):
            return (run or Run)(prepared, resumed, sources, comm, held, **launch).loop()
    finally:
        torch.use_deterministic_algorithms(before)


class Run(Parts):
    """A run from its first round to its summary."""

    def loop(self) -> TrainResult:
        """Round after round; evaluated and saved when that is due."""
        config, state = self.config, self.state
        with self.tracker, told_what_to_lower(remedies(config)):
            try:
                while state.step < self.plan.steps:
                    steps = min(config.sync_every, self.plan.steps - state.step)
                    with self._tracing():
                        metrics = self.training.run(state, steps=steps)
                    if metrics is None:
                        break
                    metrics["save_s"] = self.checkpoints.stalled_s()
                    self.recorder.round(metrics, steps=steps)
                    if _due(state.round, AGREE_EVERY_ROUNDS):
                        check_anchor(state.anchor, self.comm, round_number=state.round)
                    last = state.step == self.plan.steps
                    if last or _due(state.round, config.eval.every_rounds):
                        self.evaluate()
                    if last or _due(state.round, config.checkpoint.every_rounds):
                        self._save()
                self.stopped = max(self.comm.gather(self.stopped))  # whoever heard the signal
                if self.stopped:
                    self.recorder.collect()
                    self._save(due=False)
                return self._finish()
            finally:
                self.checkpoints.close()
                self.shelf.close()

    def _tracing(self) -> contextlib.AbstractContextManager[None]:
        due = self.state.round == self.traced_round
        return traced(self.run_dir.path / "profile.json.gz") if due else contextlib.nullcontext()

    def _save(self, *, due: bool = True) -> None:
        """Begin a checkpoint. Of one that is not due no record remains once the run goes on: it might not have been."""
        self._observe("checkpoint", round=self.state.round)
        marks = [self.tracker.mark()]
        if isinstance(self.tracker, Tracker):
            self.tracker.event("checkpoint", round=self.state.round, step=self.state.step)
            self.tracker.sync()
        marks.append(self.tracker.mark())
        card = f"Anchor after {self.state.round} rounds of a run of isoloco.\n"
        anchor, tokenizer_dir = dict(self.state.anchor), self.data[0].tokenizer_dir
        facts = {
            **marks[due], "threads": self.config.compute.threads, "config": flat(self.config),
            "data": checksum(self.data),
        }  # fmt: skip
        self.checkpoints.save(
            self.state,
            write_anchor=lambda path: models.export(self.model, anchor, path, tokenizer_dir=tokenizer_dir, card=card),
            facts=facts,
        )

    @property
    def anchor_step(self) -> int:
        """Inner steps that are in the anchor: in data-parallel training it moves in mid-round."""
        return self.state.step + (self.state.turn.steps if self.config.is_dp else 0)

    def evaluate(self) -> None:
        """The first process evaluates; the others may go on."""
        if not isinstance(self.tracker, Tracker):
            return
        started = time.perf_counter()
        self._observe("eval", round=self.state.round)
        load_anchor(self.model, self.state.anchor)
        found = evaluate_data(self.model, self.data, self.config)
        self.tracker.evaluation(
            round=self.state.round,
            step=self.anchor_step,
            tokens=self.anchor_step * self.recorder.step_tokens,
            split=self.config.eval.split,
            loss=found.loss,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
            eval_s=time.perf_counter() - started,
        )
        if self.best is not None and self.best.improves(found.loss):
            self.checkpoints.keep(BEST, export_best(self, found.loss))

    def _finish(self) -> TrainResult:
        """The model on disk, the manifest's summary, and what a person wants to see at the end."""
        run_dir = self.run_dir
        ended = "finished" if self.state.step == self.plan.steps else "stopped"
        self.comm.from_leader(lambda: self._leave(ended))  # the others read what it has written
        run_dir = RunDir.open(run_dir.path)
        records = read_metrics(run_dir.path)
        rounds = [r for r in records if r["kind"] == "round"]
        return TrainResult(
            run_dir=run_dir.path,
            state=ended,
            stopped_by=self.stopped,
            train_losses=[r["train_loss"] for r in rounds],
            evaluations=[r for r in records if r["kind"] == "eval"],
            summary=run_dir.manifest["summary"],
            rounds=rounds,
        )

    def _leave(self, ended: str) -> None:
        """What the first process writes at the end."""
        assert isinstance(self.tracker, Tracker)
        try:
            if self.stopped == "requeue":
                self.run_dir.update(state=ended)
            else:
                leave_model(self, self.tracker)
        except (OSError, SafetensorError) as error:
            reason, shown = getattr(error, "strerror", None) or error, relative(self.run_dir.path)
            raise ValueError(
                f"{shown}: what the run leaves at its end cannot be written ({reason}); make room, then "
                f"isoloco train --resume {shown} ends it"
            ) from None


def _due(round_number: int, every: int) -> bool:
    return every > 0 and round_number % every == 0
