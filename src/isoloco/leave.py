"""What a run leaves: the best model while it trains, and its last one with a card and a sample when it ends."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import model as models
from .config import RunConfig
from .console import relative
from .evaluate import sample
from .files import read_facts
from .simulate import load_anchor
from .tracking import Tracker, read_metrics

if TYPE_CHECKING:
    from .train import Run

BEST = "best"


class Best:
    """RUN/best: the anchor of the lowest held-out loss so far, a Hugging Face directory, only ever replaced whole.

    What lies there is of an earlier launch; it is forgotten where it comes after ``step``, from which the run goes on.
    """

    def __init__(self, directory: Path, *, step: int, split: str) -> None:
        self.directory, self.split, self.loss = directory, split, math.inf
        try:
            facts = read_facts(directory)
        except ValueError:  # damaged
            facts = None
        if facts and facts.get("step", math.inf) <= step and facts.get("split") == split:
            self.loss = float(facts["loss"])
        else:
            shutil.rmtree(directory, ignore_errors=True)

    def improves(self, loss: float) -> bool:
        """Whether a loss is the lowest so far; it is then the one to beat."""
        better = loss < self.loss
        if better:
            self.loss = loss
        return better


def export_best(run: Run, loss: float) -> Callable[[], object]:
    """What writes the anchor as it is now into RUN/best; called beside the training, before the anchor moves."""
    anchor, facts = dict(run.state.anchor), _facts(run, loss)
    card = model_card(run.config, tokens=facts["tokens"], loss=loss)
    target, tokenizer_dir = run.run_dir.path / BEST, run.data[0].tokenizer_dir
    return lambda: models.export(run.model, anchor, target, tokenizer_dir=tokenizer_dir, card=card, facts=facts)


def leave_model(run: Run, tracker: Tracker) -> None:
    """The last anchor as a model, the summary, and what a person wants to see at the end."""
    config, state, run_dir, data = run.config, run.state, run.run_dir, run.data[0]
    evaluated = [r for r in read_metrics(run_dir.path) if r["kind"] == "eval"]
    if not evaluated or evaluated[-1]["step"] != run.anchor_step:
        run.evaluate()
    load_anchor(run.model, state.anchor)
    run.checkpoints.wait()  # one export at a time: transformers is told to be quiet for all threads at once
    loss = tracker.figures()["valid_loss_last"]
    facts = _facts(run, loss)
    directory = models.export(
        run.model, state.anchor, run_dir.path / "model", tokenizer_dir=data.tokenizer_dir, facts=facts,
        card=model_card(config, tokens=facts["tokens"], loss=loss),
    )  # fmt: skip
    opening = data.split(config.eval.split).read(np.zeros(1, dtype=np.int64), min(12, config.model.seq_len))
    text = None  # of shards without a tokenizer, and of a model that has diverged, there is nothing to read
    if data.tokenizer_dir and math.isfinite(loss):
        text = sample(run.model, data.tokenizer_dir, tokens=40, prompt=opening[0].tolist(), seed=config.seed)
    if state.step < run.plan.steps:
        run_dir.update(state="stopped")  # finished is what it becomes with the summary, as the very last thing
    shown, other = relative(run_dir.path), "diloco" if config.method != "diloco" else "isoloco"
    unseen = " --split test" if data.tokens("test") >= config.model.seq_len else ""
    following = [f"isoloco evaluate {shown}{unseen}"]
    if run.stopped:
        following.insert(0, f"isoloco train --resume {shown}")
    else:
        following.append(
            f"isoloco train quickstart --method {other}" if config.name == "quickstart" else "isoloco methods"
        )
    summary = {
        "rounds": state.round,
        "step": run.anchor_step,
        "wire_bytes_per_worker": run.plan.round_bytes * state.round,
    }
    files = [("model", directory), ("metrics", run_dir.path / "metrics.jsonl")]
    if (run_dir.path / BEST).is_dir():
        files.insert(1, ("best model", run_dir.path / BEST))
    tracker.finish(summary, files=files, sample=text, next_commands=following)


def _facts(run: Run, loss: float) -> dict[str, Any]:
    step = run.anchor_step
    told = loss if math.isfinite(loss) else None
    return {"step": step, "tokens": step * run.recorder.step_tokens, "split": run.config.eval.split, "loss": told}


def model_card(config: RunConfig, *, tokens: int, loss: float) -> str:
    """README.md of a model that a run leaves."""
    read = config.data.source or config.data.path or "data of the workers' own"
    return (
        f"# {config.name}\n\nTrained with isoloco: method `{config.method}`, {config.workers} workers that met every "
        f"{config.sync_every} steps, {tokens:,} tokens of {read}, {config.eval.split} loss {loss:.4f} nats per token.\n"
    )
