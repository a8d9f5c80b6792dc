"""Small model directories to merge: a base, and experts that are the base and noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isoloco.seeds import generator

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "tie_word_embeddings": False}
SHAPES = {
    "model.embed_tokens.weight": (24, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.norm.weight": (8,),
    "model.layers.1.mlp.up_proj.weight": (12, 8),
    "model.layers.1.norm.weight": (8,),
    "lm_head.weight": (24, 8),
}


def tensors(key: str, *, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights that depend on the key: noise, or ``like`` and a tenth of it."""
    noise = {name: torch.randn(shape, generator=generator(key, name)) for name, shape in SHAPES.items()}
    return noise if like is None else {name: like[name] + 0.1 * noise[name] for name in noise}


def write(directory: Path, weights: dict[str, Tensor], *, shards: int = 1, **config: Any) -> str:
    """A model directory; in several files, with an index, where asked."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)
    weight_map = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(directory)


def read(directory: Path | str) -> dict[str, Tensor]:
    """All tensors of a model directory, by safetensors' own reader."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(path)
    return found


def family(directory: Path, *, experts: int = 3, shards: int = 1) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Write base and e0, e1, ... into a directory; their tensors."""
    base = tensors("base")
    others = [tensors(f"expert {i}", like=base) for i in range(experts)]
    write(directory / "base", base, shards=shards)
    for i, weights in enumerate(others):
        write(directory / f"e{i}", weights, shards=1 + i % 2)
    return base, others
