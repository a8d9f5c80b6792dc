"""Held-out loss of a model, and a sample of what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from .model import LossKernel, language_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rows(Protocol):
    """What evaluation needs of a split."""

    def rows(self, seq_len: int) -> int: ...

    def read(self, row_indices: np.ndarray, seq_len: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss in nats per predicted token, and what follows from it."""

    loss: float
    tokens: int
    """Predicted tokens the loss is the mean of: rows x (seq_len - 1)."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """loss / ln 2 / (bytes per token); None where the data's bytes are unknown."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients inside; every module's mode as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def evaluate(
    model: nn.Module,
    split: Rows,
    *,
    seq_len: int,
    batch_size: int,
    tokens: int | None = None,
    loss_kernel: LossKernel = "plain",
    autocast: AbstractContextManager | None = None,
    bytes_per_token: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Mean loss over the first rows of a split, in file order; batches weighted by their predicted tokens, in float64.

    Args:
        seq_len: tokens of a row.
        batch_size: rows of a forward pass; the last one may be shorter.
        tokens: how many tokens of the split, rounded down to whole rows (at least one); all rows where None.
        autocast: context of the forward pass, as in training.
        bytes_per_token: of the split, for bits per byte.
        progress: called with (rows done, rows in all) after each batch.

    Raises:
        ValueError: the split has no whole row.
    """
    rows = split.rows(seq_len)
    if rows < 1:
        raise ValueError(f"nothing to evaluate: the split has no row of {seq_len} tokens; use a shorter model.seq_len")
    if tokens is not None:
        rows = min(rows, max(1, tokens // seq_len))
    device = next(model.parameters()).device
    losses, counts = [], []
    with eval_mode(model), autocast or nullcontext():
        for start in range(0, rows, batch_size):
            indices = np.arange(start, min(start + batch_size, rows))
            losses.append(language_loss(model, split.read(indices, seq_len).to(device), kernel=loss_kernel))
            counts.append(len(indices))
            if progress is not None:
                progress(start + len(indices), rows)
    # one transfer at the end: the device is never waited for in the loop
    loss = float(np.average(torch.stack(losses).double().cpu().numpy(), weights=counts))
    return Evaluation(
        loss=loss,
        tokens=rows * (seq_len - 1),
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
    )


def sample(
    model: PreTrainedModel,
    tokenizer_dir: str | Path,
    *,
    tokens: int = 40,
    prompt: str | None = None,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 50,
) -> str:
    """A text the model writes: ``tokens`` tokens after the prompt (the end-of-document token where there is none).

    Temperature and top-k sampling from a generator of its own; ``temperature=0`` takes the most probable token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True, trust_remote_code=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    ids = ids or [tokenizer.eos_token_id]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(ids) + tokens
    with eval_mode(model):
        for _ in range(tokens):
            # No cache: a few dozen tokens, and every architecture has this path.
            logits_C = model(input_ids=torch.tensor([ids[-limit:]], device=device)).logits[0, -1].float().cpu()
            if temperature == 0:
                ids.append(int(logits_C.argmax()))
                continue
            best_K, candidates_K = (logits_C / temperature).topk(min(top_k, len(logits_C)))
            ids.append(int(candidates_K[torch.multinomial(best_K.softmax(-1), 1, generator=generator)]))
    return tokenizer.decode(ids, skip_special_tokens=True)
