"""Train a language model from a RunConfig: check everything, build the parts, then the loop over rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from . import model as models
from . import resume as resuming
from .checkpoint import Checkpoints
from .comm import Comm, connect
from .config import ModelConfig, RunConfig, flat, options, to_dict
from .console import relative
from .data.feed import checksum, reader, vocabulary
from .evaluate import evaluate_data
from .launch import traced
from .leave import BEST, Best, export_best, leave_model
from .loss import loss_function
from .memory import remedies, told_what_to_lower
from .outline import Prepared, check_anchor, check_together, get_ready, prepare_run
from .plan import header_rows, training_rows
from .presets import METHODS
from .recorder import Recorder
from .rundir import check_place
from .saved import load as load_checkpoint
from .shelf import make_shelf
from .simulate import build_round, load_anchor
from .tracking import Follower, RunDir, Tracker, read_metrics

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
        return _train(
            config, comm, sources=sources or {}, resume=resume, previous=resume_from_previous,
            quiet=quiet, stop=stop, observe=observe, command=command, profile=profile,
        )  # fmt: skip
    finally:
        comm.close()


def _train(
    config: RunConfig,
    comm: Comm,
    *,
    sources: dict[str, str],
    resume: str | Path | None,
    previous: bool,
    run: type[_Run] | None = None,
    **launch: Any,
) -> TrainResult:
    check_together(config, comm)
    if resume is None:
        comm.from_leader(lambda: check_place(config))
    comm.from_leader(lambda: get_ready(config))  # one process prepares the data that all read
    prepared = comm.together(lambda: prepare_run(config))
    sources = _origins(config, prepared.config, sources)
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
            return (run or _Run)(prepared, resumed, sources, comm, held, **launch).loop()
    finally:
        torch.use_deterministic_algorithms(before)


class _Run:
    """A run from its first check to its summary."""

    def __init__(
        self,
        prepared: Prepared,
        resumed: resuming.Resumed | None,
        sources: dict[str, str],
        comm: Comm,
        held: contextlib.ExitStack,
        *,
        quiet: bool,
        stop: Callable[[], str | bool],
        observe: Callable[..., None] | None,
        command: str | None,
        profile: bool = False,
    ) -> None:
        self.config, self.plan, self.data = prepared.config, prepared.plan, prepared.data
        self.comm, self.held, self.stop_asked, self.stopped = comm, held, stop, ""
        config, plan, data = self.config, self.plan, self.data
        vocab, device = vocabulary(data), config.compute.device
        if resumed is not None and resumed.is_done(plan.steps):
            raise ValueError(f"{resumed.run_dir.path}: its budget of {plan.steps:,} steps is used up; raise the budget")
        stored = resumed and resumed.checkpoint
        loss, read = loss_function(config), reader(config, data)
        self.model = comm.together(lambda: self._build_model(stored, loss, read))
        path = comm.from_leader(lambda: str(self._take_place(resumed, command, sources)))
        self.run_dir = RunDir.open(path)
        hosted = [0] if config.is_dp else comm.hosted(config.workers)
        folder = self.run_dir.path / (resuming.WAITING + f"-{comm.member}" * (comm.member > 0))
        self.shelf = make_shelf(config.compute.worker_state, folder=folder, device=device)
        state = None
        if stored:
            state = comm.together(
                lambda: load_checkpoint(stored, workers=hosted, device=device, shelf=self.shelf, comm=comm)
            )
            state.anchor = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        self.tracker = comm.together(lambda: self._tracker(resumed, quiet=quiet))
        self.checkpoints = Checkpoints(
            self.run_dir.path / resuming.CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            warn=self.tracker.warn,
            comm=comm,
        )
        self.best = None
        if config.checkpoint.best and comm.rank == 0:
            step = resumed.manifest["state"]["step"] if resumed is not None else 0
            self.best = Best(self.run_dir.path / BEST, step=step, split=config.eval.split)
        self.recorder = Recorder(
            self.tracker, config=config, plan=plan, model=self.model, hear=observe, comm=comm,
            flops_per_token=models.flops_per_token(config, vocab),
        )  # fmt: skip
        self.training, self.state = build_round(
            self.model, loss, read, config=config, total_steps=plan.steps, weight_fn=_predicted_tokens,
            observe=self._observe, stop=self._stop, state=state, shelf=self.shelf, comm=comm,
        )  # fmt: skip
        self.recorder.state = self.state
        # the second one has no compilation and no buffers to make
        self.traced_round = min(self.state.round + 1, plan.rounds - 1) if profile and comm.rank == 0 else None
        check_anchor(self.state.anchor, comm, round_number=self.state.round)
        rows = header_rows(config, plan, data_path=data[0].path) + training_rows(self.training)
        if resumed is not None:
            anew = ", its schedule laid anew over the new budget" if resumed.relaid else ""
            begun = f"from {stored.name}" if stored else "from the start, no checkpoint was there yet:"
            rows.append(("resumed", f"{begun}, step {self.state.step:,}{anew}"))
            if stored and (threads := resumed.manifest["threads"]) != config.compute.threads:
                self.tracker.warn(
                    f"resumed with {config.compute.threads} threads after {threads}: sums may round apart"
                )
        if isinstance(self.tracker, Tracker):
            self.tracker.header(rows, sources)

    def _build_model(self, stored: Path | None, loss: Any, read: Any) -> Any:
        """The live model, checked for what cannot be trained."""
        config, data, device = self.config, self.data, self.config.compute.device
        weights = replace(config, model=_stored_model(config, stored / "anchor")) if stored else config
        with told_what_to_lower(remedies(config)):
            model = models.build(weights, vocab_size=vocabulary(data), eos_id=data[0].eos_id, device=device)
            if config.compute.activation_checkpointing:
                models.checkpoint_activations(model)
            models.check_buffers(model, loss, read(0, 0)[0][:1])
        return model

    def _take_place(self, resumed: resuming.Resumed | None, command: str | None, sources: dict[str, str]) -> Path:
        """The run directory, made or cleared of what comes after the checkpoint, with the config as resolved."""
        if resumed is not None:
            run_dir = resumed.run_dir
            run_dir.claim()
            self.held.callback(run_dir.release)
            resuming.forget_after(resumed)
        else:
            run_dir = RunDir.create(self.config, data_checksum=checksum(self.data))
            self.held.callback(run_dir.release)
            run_dir.update(parameters=self.plan.parameters, processes=self.comm.processes)
            if command:
                run_dir.update(command=command)
        run_dir.write_config(to_dict(self.config), sources)
        return run_dir.path

    def _tracker(self, resumed: resuming.Resumed | None, *, quiet: bool) -> Tracker | Follower:
        if self.comm.rank:
            return Follower(self.run_dir, rank=self.comm.rank)
        tracker = Tracker(
            self.run_dir, config=self.config, total_rounds=self.plan.rounds, total_steps=self.plan.steps, quiet=quiet,
            resume=resumed is not None,
        )  # fmt: skip
        if resumed is not None:
            tracker.truncate(resumed.manifest["state"]["step"], records=resumed.manifest["records"])
        return tracker

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

    def _stop(self) -> bool:
        asked = self.stop_asked()
        if asked:
            self.stopped = asked if isinstance(asked, str) else "interrupt"
        return bool(asked)

    def _observe(self, phase: str, **info: Any) -> None:
        self.checkpoints.observe(phase, **info)
        self.recorder.observe(phase, **info)

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


def _stored_model(config: RunConfig, directory: Path) -> ModelConfig:
    return ModelConfig(init_from=str(directory), seq_len=config.model.seq_len)


def _predicted_tokens(rows_BT: Tensor) -> float:
    return float(rows_BT.shape[0] * (rows_BT.shape[1] - 1))


def _origins(asked: RunConfig, resolved: RunConfig, given: dict[str, str]) -> dict[str, str]:
    """Where the values that are no defaults came from: ``given``, else method, machine, or a rule of the config."""
    preset, known, before = METHODS[resolved.method], options(), flat(asked)
    found = {}
    for key, value in flat(resolved).items():
        if value not in (known[key].default, {}):
            chosen_here = value != before[key]
            of_method = f"method {resolved.method}" if preset.get(key) == value else "derived"
            found[key] = given.get(key) or ("this machine" if chosen_here else of_method)
    return {key: found[key] for key in sorted(found, key=lambda key: [*given, key].index(key))}
