"""Held-out loss of a model, and a sample of what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from .config import DataConfig, EvalConfig, ModelConfig, RunConfig, TransformConfig
from .files import check_tokenizer
from .loss import autocast as precision_context
from .loss import language_loss
from .model import build

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .data.shards import Data, Split

TOKENS_OF_A_PASS = 16384  # of a forward pass in evaluation


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
    split: Split,
    *,
    seq_len: int,
    batch_size: int,
    tokens: int | None = None,
    loss_kernel: str = "plain",
    autocast: AbstractContextManager | None = None,
    bytes_per_token: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Mean loss over the first rows of a split, in file order; batches weighted by their predicted tokens, in float64.

    Args:
        seq_len: tokens of a row.
        batch_size: rows of a forward pass; the last one may be shorter.
        tokens: how many tokens of the split, rounded down to whole rows (at least one); all rows where None.
        loss_kernel: plain or chunked (see `isoloco.loss`).
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
        perplexity=perplexity(loss),
        bits_per_byte=None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
    )


def evaluate_data(
    model: nn.Module,
    data: Sequence[Data],
    config: RunConfig,
    *,
    split: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Held-out loss as a resolved config says; where workers have data of their own, the mean over the directories.

    ``split`` None is the config's ``eval.split``. Errors: as `evaluate`.
    """
    split, seq_len = split or config.eval.split, config.model.seq_len
    found = [
        evaluate(
            model,
            part.split(split),
            seq_len=seq_len,
            batch_size=max(1, min(32, TOKENS_OF_A_PASS // seq_len)),
            tokens=config.eval.tokens,
            loss_kernel=config.compute.loss_kernel,
            autocast=precision_context(config.compute.device, config.compute.precision),
            bytes_per_token=part.bytes_per_token(split),
            progress=progress,
        )
        for part in {part.path: part for part in data}.values()
    ]
    if len(found) == 1:
        return found[0]
    loss = sum(each.loss for each in found) / len(found)
    bits = [each.bits_per_byte for each in found if each.bits_per_byte is not None]
    return Evaluation(
        loss=loss,
        tokens=sum(each.tokens for each in found),
        perplexity=perplexity(loss),
        bits_per_byte=sum(bits) / len(bits) if len(bits) == len(found) else None,
    )


def evaluate_directory(
    directory: str | Path,
    *,
    data_path: str | Path | None = None,
    split: str | None = None,
    seq_len: int | None = None,
    tokens: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Held-out loss of a run's model, or of any Hugging Face causal language model in a directory.

    A run (its directory, or the ``model`` in it) brings its data, split, row length, precision and loss kernel; on the
    device it was trained on this is the loss that the run itself reported for its last anchor. What is given here wins.

    Args:
        directory: of a run, or of a model with safetensors.
        data_path: directory of shards; needed where there is no run.
        split: train, valid or test; valid where nothing says otherwise.
        seq_len: tokens of a row; without a run, the positions that the model has, 2048 at most.
        tokens: how many tokens of the split; all of it where nothing says otherwise.
        device: cpu, cuda, cuda:N, or auto.
        progress: as in `evaluate`.

    Raises:
        ValueError: no model there, no data named, a vocabulary or row length that does not fit.
    """
    from .data.feed import open_run_data, vocabulary
    from .data.shards import open_data
    from .plan import resolve_hardware
    from .resume import read_config

    directory = Path(directory)
    run = next((path for path in (directory, directory.parent) if (path / "config.yaml").is_file()), None)
    model_dir = directory / "model" if run == directory else directory
    if not model_dir.is_dir():
        raise ValueError(f"{directory}: no model there; give the directory of a run that has ended, or of a model")
    if run is not None:
        config = read_config(run / "config.yaml")
    elif data_path is not None:
        config = RunConfig(model=ModelConfig(init_from=str(model_dir), seq_len=seq_len or _positions(model_dir)))
    else:
        raise ValueError(f"{directory}: no run there that says which data; name a directory of shards (--data)")
    data = open_run_data(config) if data_path is None else [open_data(data_path)]
    for part in data:
        part.split(split or config.eval.split)  # is there one, before the weights are read
    vocab_size = vocabulary(data)
    config = replace(
        config,
        model=ModelConfig(init_from=str(model_dir), seq_len=seq_len or config.model.seq_len),
        data=DataConfig(path=str(data[0].path)),
        eval=EvalConfig(tokens=tokens or config.eval.tokens, split=config.eval.split),
        compute=replace(config.compute, device=device, compile=False),
        # nothing is transformed, and a rule of the user's own is code, which no evaluation needs to run
        transform=config.transform if config.is_dp else TransformConfig(name="none", options={}),
    )
    config = resolve_hardware(config, vocab_size=vocab_size)
    model = build(config, vocab_size=vocab_size, device=config.compute.device)
    return evaluate_data(model, data, config, split=split, progress=progress)


def _positions(model_dir: Path) -> int:
    """Row length for a model that nobody gave one for."""
    import json

    try:
        values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 2048  # `build` says what is wrong with the directory
    return min(2048, values.get("max_position_embeddings") or values.get("n_positions") or 2048)


def perplexity(loss: float) -> float:
    """exp(loss); infinity where that is more than a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


def sample(
    model: PreTrainedModel,
    tokenizer_dir: str | Path,
    *,
    tokens: int = 40,
    prompt: str | Sequence[int] | None = None,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 50,
) -> str:
    """A text the model writes: ``tokens`` tokens after the prompt (text or ids; the end-of-document token without one).

    Temperature and top-k sampling from a generator of its own; ``temperature=0`` takes the most probable token. The
    model's mode stays as it was, and so do all other random generators. ValueError: no prompt and no such token, or
    a model whose logits are not finite.
    """
    from transformers import AutoTokenizer

    check_tokenizer(Path(tokenizer_dir))
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True, trust_remote_code=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else list(prompt or ())
    if not ids and tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {tokenizer_dir} has no end-of-document token to start from; give a prompt")
    ids = ids or [tokenizer.eos_token_id]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(ids) + tokens
    with eval_mode(model):
        for _ in range(tokens):
            # No cache: a few dozen tokens, and every architecture has this path.
            logits_C = model(input_ids=torch.tensor([ids[-limit:]], device=device)).logits[0, -1].float().cpu()
            if logits_C.isnan().any() or logits_C.isposinf().any():
                raise ValueError("the model's logits are not finite: it has diverged, and writes nothing")
            if temperature == 0:
                ids.append(int(logits_C.argmax()))
                continue
            best_K, candidates_K = (logits_C / temperature).topk(min(top_k, len(logits_C)))
            ids.append(int(candidates_K[torch.multinomial(best_K.softmax(-1), 1, generator=generator)]))
    return tokenizer.decode(ids, skip_special_tokens=True)
