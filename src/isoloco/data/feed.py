"""What a run reads: its data opened, and each worker's slice of each step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..config import RunConfig
from .order import Order
from .shards import Data, open_data

if TYPE_CHECKING:
    from torch import Tensor


SPLIT_SEED = 42


def open_run_data(config: RunConfig) -> list[Data]:
    """The run's data: one directory, or one for each worker. A source is prepared first, once (see `is_ready`).

    Raises:
        ValueError: no data there, or workers' own data of different vocabularies.
    """
    paths: Sequence[object] = config.data.per_worker or [config.data.path]
    if config.data.source is not None:
        from .prepare import ensure  # only a source needs the tokenizers

        # which documents are held out does not depend on the run's seed: runs of several seeds compare
        paths = [ensure(config.data, seed=SPLIT_SEED)]
    data = [open_data(str(path)) for path in paths]
    if len(sizes := {d.vocab_size for d in data}) > 1:
        raise ValueError(f"data.per_worker: vocabularies of {sizes} entries differ; prepare all with one tokenizer")
    return data


def is_ready(config: RunConfig) -> bool:
    """Whether the run's data lies there and need not be prepared."""
    from .prepare import is_prepared

    return config.data.source is None or is_prepared(config.data, seed=SPLIT_SEED)


def vocabulary(data: list[Data]) -> int:
    """Entries that the token ids need: the tokenizer's, or what the shards hold where there is no manifest."""
    return max(d.vocab_size if d.vocab_size is not None else d.largest_id() + 1 for d in data)


def checksum(data: list[Data]) -> str:
    """Identity of what is read, whatever the directories are called."""
    return "+".join(d.checksum for d in data)


def reader(config: RunConfig, data: list[Data]) -> Callable[[int, int], list[Tensor]]:
    """``read(worker, step)``: the worker's slice of that step's rows, as micro-batches of [b, T] token ids.

    Common data: global step s reads positions [s B, (s + 1) B) of the epochs' row order, worker w its slice of them.
    Data of its own: worker w reads positions [s b, (s + 1) b) of its own rows, b = B / W.
    """
    splits = [d.split("train") for d in data]
    orders = [Order(s.rows(config.model.seq_len), seed=config.seed) for s in splits]
    share, micro = config.worker_batch_size, config.micro_batch_size or config.worker_batch_size

    def read(worker: int, step: int) -> list[Tensor]:
        if config.data.per_worker:
            own, start = worker, step * share
        else:
            own, start = 0, step * config.global_batch_size + worker * share
        rows = orders[own].take(start, start + share)
        batch = splits[own].read(rows, config.model.seq_len).to(config.compute.device)
        return list(batch.split(micro))

    return read
