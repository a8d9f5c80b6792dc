"""What can be told of a run before its first step: a config with every choice made, its data, its figures."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import model as models
from ._version import __version__
from .comm import Comm
from .config import RunConfig, flat, identity
from .data.feed import checksum, is_ready, open_run_data, vocabulary
from .data.shards import Data
from .data.tokenizer import bpe_size
from .plan import Plan, budget_steps, check_data, make_plan, place_states, resolve_hardware
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


def prepare_run(config: RunConfig, *, hosted: int | None = None) -> Prepared:
    """Check and resolve a config: data found or prepared, hardware chosen, budget laid out. Builds no weights.

    Args:
        hosted: workers that this process trains, for its memory; all of them where it is not given.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """
    check_extras(config)
    config = resolve_hardware(config)
    models.model_config(config, vocab_size=1)  # no network, no need to prepare its data, which may take hours
    data = open_run_data(config)
    train_tokens = sum(d.tokens("train") for d in data)
    config, meta, plan = _lay_out(config, vocabulary(data), train_tokens=train_tokens, hosted=hosted)
    for each in data:
        each.check_vocab(meta.config.get_text_config().vocab_size)
        check_data(config, each, tokens=plan.tokens // len(data))
    return Prepared(config, data, plan, identity(config, data_checksum=checksum(data)))


def get_ready(config: RunConfig) -> None:
    """Prepare the data of a source, where that has not been done."""
    if not is_ready(config):
        open_run_data(config)


def check_together(config: RunConfig, comm: Comm) -> None:
    """Several processes train by one config with one version. ValueError names who has another, and where it differs.

    What belongs to a machine may differ: threads, device.
    """
    mine = {key: value for key, value in flat(config).items() if key not in ("compute.threads", "compute.device")}
    mine["version"] = __version__
    everyone = comm.gather(mine)
    for rank, theirs in enumerate(everyone):
        told = [
            f"{key} {theirs[key]!r} and not {value!r}" for key, value in everyone[0].items() if theirs[key] != value
        ]
        if told:
            raise ValueError(
                f"rank {rank} has another config than rank 0: {', '.join(told)}; start all with one config"
            )


def check_anchor(anchor: Mapping[str, Tensor], comm: Comm, *, round_number: int) -> None:
    """All processes have the same anchor. ValueError names who has another, and the first tensor that differs."""
    if comm.processes == 1:
        return
    everyone = comm.gather({name: digest_of(tensor) for name, tensor in anchor.items()})
    for rank, theirs in enumerate(everyone):
        if different := [name for name, found in everyone[0].items() if theirs.get(name) != found]:
            raise ValueError(
                f"after round {round_number} rank {rank} has another anchor than rank 0 in {different[0]} "
                f"({len(different)} of {len(theirs)} tensors); go on from the last checkpoint: --resume"
            )


def digest_of(tensor: Tensor) -> str:
    """Checksum of a tensor's bytes."""
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


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


def _lay_out(
    config: RunConfig, vocab: int, *, train_tokens: int, hosted: int | None = None
) -> tuple[RunConfig, Any, Plan]:
    """Resolved config, network without weights, figures."""
    config = resolve_hardware(config, vocab_size=vocab)
    meta = models.meta_model(config, vocab)
    if not config.is_dp:  # is there anything to transform?
        trainable = {name: p for name, p in meta.named_parameters() if p.requires_grad}
        build_outer(trainable, config=config, roles=roles(meta), transposed=transposed(meta))
    steps = budget_steps(config, sum(p.numel() for p in meta.parameters()))
    plan = make_plan(config, meta, steps=steps, train_tokens=train_tokens, hosted=hosted)
    config, plan = place_states(config, plan, meta, train_tokens=train_tokens)
    return config, meta, plan
