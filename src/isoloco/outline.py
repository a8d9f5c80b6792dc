"""What can be told of a run before its first step: a config with every choice made, its data, its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import model as models
from .config import RunConfig, identity
from .data.feed import checksum, is_ready, open_run_data, vocabulary
from .data.shards import Data
from .data.tokenizer import bpe_size
from .plan import Plan, budget_steps, check_data, make_plan, resolve_hardware
from .roles import roles, transposed
from .simulate import build_outer
from .tracking import check_extras


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
    config, meta, plan = _lay_out(config, vocabulary(data), train_tokens=sum(d.tokens("train") for d in data))
    for each in data:
        each.check_vocab(meta.config.get_text_config().vocab_size)
        check_data(config, each, tokens=plan.tokens // len(data))
    return Prepared(config, data, plan, identity(config, data_checksum=checksum(data)))


def outline_run(config: RunConfig) -> tuple[RunConfig, Plan, str]:
    """Config, figures and data of a run, told without preparing anything: see `prepare_run`, whose errors it has.

    Where a source is not prepared yet, the vocabulary is that of the tokenizer to be trained, or else the model's own.
    """
    if is_ready(config):
        prepared = prepare_run(config)
        return prepared.config, prepared.plan, str(prepared.data[0].path)
    config = resolve_hardware(config)
    own = models.model_config(config, vocab_size=1).get_text_config().vocab_size  # 1: it takes the tokenizer's
    vocab = bpe_size(config.data.tokenizer or "") or own
    if vocab == 1:
        raise ValueError(
            f"model.preset {config.model.preset} takes the vocabulary of {config.data.tokenizer}, which is known "
            "once its data is prepared: isoloco prepare"
        )
    config, _, plan = _lay_out(config, vocab, train_tokens=0)
    return config, plan, f"{config.data.source}, prepared when a training starts"


def _lay_out(config: RunConfig, vocab: int, *, train_tokens: int) -> tuple[RunConfig, Any, Plan]:
    """Resolved config, network without weights, figures."""
    config = resolve_hardware(config, vocab_size=vocab)
    meta = models.meta_model(config, vocab)
    if not config.is_dp:  # is there anything to transform?
        trainable = {name: p for name, p in meta.named_parameters() if p.requires_grad}
        build_outer(trainable, config=config, roles=roles(meta), transposed=transposed(meta))
    steps = budget_steps(config, sum(p.numel() for p in meta.parameters()))
    return config, meta, make_plan(config, meta, steps=steps, train_tokens=train_tokens)
