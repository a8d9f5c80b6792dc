"""Train a language model from a RunConfig: check everything, build the parts, then the loop over rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import model as models
from .config import RunConfig, flat, identity, options, to_dict
from .data.feed import checksum, open_run_data, reader, vocabulary
from .data.shards import Data
from .evaluate import evaluate_data, sample
from .loss import loss_function
from .plan import Plan, budget_steps, check_data, header_rows, make_plan, resolve_hardware
from .presets import METHODS
from .recorder import Recorder
from .roles import roles, transposed
from .round import Round, RoundState
from .rundir import check_place
from .simulate import build_outer, build_round, load_anchor, round_steps
from .tracking import RunDir, Tracker, check_extras

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class TrainResult:
    """What a run came to. Losses are mean nats per predicted token."""

    run_dir: Path
    state: str  # finished | stopped
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


@dataclass(frozen=True)
class Prepared:
    """A config with every choice made, its data and its figures: all that can be told before the first step."""

    config: RunConfig
    data: list[Data]  # one, or one for each worker
    plan: Plan
    identity: str


def prepare_run(config: RunConfig) -> Prepared:
    """Check and resolve a config: data found or prepared, hardware chosen, budget laid out. Builds no weights.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """
    check_extras(config)
    config = resolve_hardware(config)
    models.model_config(config, vocab_size=1)  # no network, no need to prepare its data, which may take hours
    data = open_run_data(config)
    vocab = vocabulary(data)
    config = resolve_hardware(config, vocab_size=vocab)
    meta = models.meta_model(config, vocab)
    for each in data:
        each.check_vocab(meta.config.get_text_config().vocab_size)
    if not config.is_dp:  # is there anything to transform?
        trainable = {name: p for name, p in meta.named_parameters() if p.requires_grad}
        build_outer(trainable, config=config, roles=roles(meta), transposed=transposed(meta))
    steps = budget_steps(config, sum(p.numel() for p in meta.parameters()))
    plan = make_plan(config, meta, steps=steps, train_tokens=sum(d.tokens("train") for d in data))
    for each in data:
        check_data(config, each, tokens=plan.tokens // len(data))
    return Prepared(config, data, plan, identity(config, data_checksum=checksum(data)))


def train(
    config: RunConfig,
    *,
    sources: dict[str, str] | None = None,
    quiet: bool = True,
    stop: Callable[[], bool] = lambda: False,
    observe: Callable[..., None] | None = None,
    command: str | None = None,
) -> TrainResult:
    """Train by ``config`` into a new run directory.

    Installs no signal handlers and exits nothing. ``stop()`` is asked before every inner step; once it says so the run
    ends with the anchor of the last finished round. ``observe(phase, **info)`` hears every phase. ``sources`` says
    where values came from, for the header; ``command`` is kept in the manifest.

    Raises:
        ValueError: bad config or data, before anything is written.
    """
    check_place(config)
    prepared = prepare_run(config)
    sources = _origins(config, prepared.config, sources or {})
    config, plan, data = prepared.config, prepared.plan, prepared.data
    torch.set_num_threads(config.compute.threads or torch.get_num_threads())
    model = models.build(config, vocab_size=vocabulary(data), eos_id=data[0].eos_id, device=config.compute.device)
    if config.compute.activation_checkpointing:
        models.checkpoint_activations(model)
    loss, read = loss_function(config), reader(config, data)
    models.check_buffers(model, loss, read(0, 0)[0][:1])
    run_dir = RunDir.create(config, data_checksum=checksum(data))
    run_dir.update(command=command or "isoloco.train")
    run_dir.write_config(to_dict(config), sources)
    with Tracker(run_dir, config=config, total_rounds=plan.rounds, total_steps=plan.steps, quiet=quiet) as tracker:
        tracker.header(header_rows(config, plan, data_path=data[0].path), sources)
        recorder = Recorder(
            tracker, config=config, plan=plan, model=model, hear=observe,
            flops_per_token=models.flops_per_token(config, vocabulary(data)),
        )  # fmt: skip
        training, state = build_round(
            model, loss, read,
            config=config, total_steps=plan.steps, weight_fn=_predicted_tokens, observe=recorder.observe, stop=stop,
        )  # fmt: skip
        recorder.state = state
        rounds, evaluations = _loop(prepared, model, training, state, recorder)
        return _finish(prepared, model, state, tracker, rounds=rounds, evaluations=evaluations)


def _loop(
    prepared: Prepared, model: PreTrainedModel, training: Round, state: RoundState, recorder: Recorder
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Round after round, evaluated when it is due and at the end; what the rounds and the evaluations came to."""
    config = prepared.config
    lengths = round_steps(prepared.plan.steps, config.sync_every)
    rounds: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    for steps in lengths[state.round :]:
        metrics = training.run(state, steps=steps)
        if metrics is None:  # told to stop
            break
        recorder.round(metrics, steps=steps)
        rounds.append(metrics)
        every = config.eval.every_rounds
        if every and state.round % every == 0 and state.round < len(lengths):
            evaluations.append(_evaluate(prepared, model, state, recorder))
    if not evaluations or evaluations[-1]["round"] != state.round:
        evaluations.append(_evaluate(prepared, model, state, recorder))
    return rounds, evaluations


def _evaluate(prepared: Prepared, model: PreTrainedModel, state: RoundState, recorder: Recorder) -> dict[str, Any]:
    started = time.perf_counter()
    load_anchor(model, state.anchor)
    recorder.observe("eval", round=state.round)
    found = evaluate_data(model, prepared.data, prepared.config)
    fields = {
        "round": state.round,
        "step": state.step,
        "tokens": state.step * recorder.step_tokens,
        "split": prepared.config.eval.split,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "eval_s": time.perf_counter() - started,
    }
    recorder.tracker.evaluation(**fields)
    return fields


def _finish(
    prepared: Prepared,
    model: PreTrainedModel,
    state: RoundState,
    tracker: Tracker,
    *,
    rounds: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
) -> TrainResult:
    """The model on disk, the manifest's summary, and what a person wants to see at the end."""
    config, plan = prepared.config, prepared.plan
    load_anchor(model, state.anchor)
    ended = "finished" if state.round == plan.rounds else "stopped"
    run_dir, tokenizer_dir = tracker.run_dir, prepared.data[0].tokenizer_dir
    summary: dict[str, Any] = {
        "rounds": state.round,
        "step": state.step,
        "modelled_bytes_per_worker": plan.round_bytes * state.round,
    }
    card = _model_card(config, tokens=evaluations[-1]["tokens"], loss=evaluations[-1]["loss"])
    directory = models.export(model, state.anchor, run_dir.path / "model", tokenizer_dir=tokenizer_dir, card=card)
    text = sample(model, tokenizer_dir, tokens=40, seed=config.seed) if tokenizer_dir else None
    run_dir.update(state=ended)
    other = "diloco" if config.method != "diloco" else "isoloco"
    tracker.finish(
        summary,
        files=[("model", directory), ("metrics", run_dir.path / "metrics.jsonl")],
        sample=text,
        next_commands=[
            f"isoloco evaluate {run_dir.path} --split test",
            f"isoloco train {config.name} --method {other}" if config.name == "quickstart" else "isoloco methods",
        ],
    )
    return TrainResult(
        run_dir=run_dir.path,
        state=ended,
        train_losses=[r["train_loss"] for r in rounds],
        evaluations=evaluations,
        summary=run_dir.manifest["summary"],
        rounds=rounds,
    )


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


def _model_card(config: RunConfig, *, tokens: int, loss: float) -> str:
    read = config.data.source or config.data.path or "data of the workers' own"
    return (
        f"# {config.name}\n\nTrained with isoloco: method `{config.method}`, {config.workers} workers that met every "
        f"{config.sync_every} steps, {tokens:,} tokens of {read}, {config.eval.split} loss {loss:.4f} nats per token.\n"
    )
