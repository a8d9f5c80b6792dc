"""What each parameter is: matrix, embedding, head or vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

ROLES = ("matrix", "embedding", "head", "vector")


def roles(model: nn.Module, *, head: Collection[str] = ()) -> dict[str, str]:
    """Role of every parameter, by its name in ``model.named_parameters()``.

    ``embedding``: a table of ``nn.Embedding`` or ``nn.EmbeddingBag`` (positions included). ``head``: the weight of what
    a transformers model returns from ``get_output_embeddings()``, and the names given as ``head``, for models that have
    no such method. ``matrix``: any other 2-D weight ``[M, N]``, and 3-D stacks of them ``[experts, M, N]``. ``vector``:
    the rest, which matrix methods leave alone: biases, norms, scalars, and the kernels of convolutions (3-D to 5-D).
    Tied parameters are one parameter, of role embedding, under the name that ``named_parameters`` gives it.
    ValueError for a name in ``head`` that is no parameter.
    """
    embeddings: set[int] = set()
    heads: set[int] = set()
    kernels: set[int] = set()
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings |= own
        elif isinstance(module, _ConvNd):
            kernels |= own
        get_head: Any = getattr(module, "get_output_embeddings", None)
        if get_head is not None and (layer := get_head()) is not None:
            heads |= {id(weight) for weight in layer.parameters() if weight.ndim == 2}

    named = dict(model.named_parameters())
    if missing := sorted(set(head) - named.keys()):
        raise ValueError(f"head names {', '.join(missing)}: the model has no such parameter")

    def role(name: str, parameter: Tensor) -> str:
        if id(parameter) in embeddings:
            return "embedding"
        if id(parameter) in heads or name in head:
            return "head"
        return "matrix" if parameter.ndim in (2, 3) and id(parameter) not in kernels else "vector"

    return {name: role(name, parameter) for name, parameter in named.items()}


def transposed(model: nn.Module) -> set[str]:
    """Names of the weights stored ``[in, out]`` instead of ``[out, in]``: those of transformers' ``Conv1D`` (GPT-2)."""
    stored = {id(m.weight) for m in model.modules() if _is_conv1d(m)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in stored}


def _is_conv1d(module: nn.Module) -> bool:
    # By name, so that a model from elsewhere costs no import of transformers.
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def select(patterns: Collection[str], roles: Mapping[str, str]) -> set[str]:
    """Names of the parameters that any of ``patterns`` (a role, or a glob over names as in ``*.mlp.*``) matches.

    ValueError for a pattern that matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name, role in roles.items() if role == pattern or fnmatchcase(name, pattern)}
        if not found:
            present = ", ".join(role for role in ROLES if role in roles.values())
            example = next(iter(roles), "none")
            raise ValueError(f"{pattern!r} matches no parameter: roles here are {present}; names look like {example!r}")
        chosen |= found
    return chosen
