"""Tiny networks of every kind that tests train: Llama tied and untied, GPT-2, Qwen3, a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isoloco.config import ModelConfig, RunConfig, from_flat

VOCAB = 64
SEQ_LEN = 16

_LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": None, "max_position_embeddings": 64,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": False},
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    # weights stored [in, out], biases, dropout, tied, learned positions
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": None, "n_positions": 64,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    },
    # norms of queries and keys, grouped queries, a head dimension of its own
    "qwen3": {
        **_LLAMA, "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
    },
    # experts in one 3-D weight each
    "mixtral": {
        **_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_file(name: str, directory: Path, **changes: Any) -> str:
    """The config JSON of one of ``CONFIGS``, written to a directory; what ``model.config`` takes."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(path)


def run_config(name: str, directory: Path, **options: Any) -> RunConfig:
    """A config of a run of one of ``CONFIGS``; options as ``RunConfig`` takes them."""
    return RunConfig(model=ModelConfig(config=config_file(name, directory), seq_len=SEQ_LEN), **options)


def short_run(out_dir: Path, data: Path, network: str, /, **dotted: Any) -> RunConfig:
    """The config of a run of a second or two, saved after every round; other options with __ for the dot."""
    values = {
        "out_dir": str(out_dir), "data.path": str(data), "model.config": network, "model.seq_len": SEQ_LEN,
        "workers": 2, "sync_every": 2, "global_batch_size": 4, "budget.steps": 8, "compute.threads": 1,
        "eval.every_rounds": 1, "eval.tokens": 64, "checkpoint.every_rounds": 1, "log.every_steps": 1,
    }  # fmt: skip
    return from_flat(values | {key.replace("__", "."): value for key, value in dotted.items()})
