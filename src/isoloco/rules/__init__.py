"""The rules: how workers' deltas become one (reduces), and what is done to the one (transforms).

Pure functions of tensors. They know no names, ranks, files or momentum; they assume finite input, compute in float32 or
better, return the input's dtype, are odd (f(-x) = -f(x)) and declare how they scale.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import seeds
from ..config import unknown
from .base import Additive, AdditiveRule, Reduce, Transform, in_words, joint, option_kinds, option_parameters, sections
from .base import transform as transform
from .elementwise import Dare, Mean, Ties
from .spectral import clip_high, clip_low, iso_c, iso_cts, none, tsv

REDUCES: dict[str, Any] = {
    "mean": Mean,
    "ties": Ties,
    "dare": Dare,
    "tsv": tsv,
    "iso_cts": iso_cts,
}
TRANSFORMS: dict[str, Any] = {
    "none": none,
    "iso_c": iso_c,
    "clip_high": clip_high,
    "clip_low": clip_low,
}
BUILT_IN = frozenset(REDUCES) | frozenset(TRANSFORMS)


def register(name: str, fn: Callable[..., Any] | AdditiveRule) -> None:
    """Make a rule known by a name.

    ``fn`` is an additive reduce (an object or a class with ``encode`` and ``decode``), a joint reduce
    ``fn(deltas_WS, weights_W, **options)`` or a transform ``fn(delta_S, **options)``; its keyword-only arguments are its
    options. ValueError for a name of the project's own, and for anything else.
    """
    if name in BUILT_IN:
        raise ValueError(f"{name} is one of the project's own rules: register yours under another name")
    table, other = (REDUCES, TRANSFORMS) if is_reduce(fn) else (TRANSFORMS, REDUCES)
    other.pop(name, None)
    table[name] = fn


def bind_reduce(name: str, options: Mapping[str, Any] | None = None) -> Reduce:
    """The reduce of that name (or ``package.module:function``) with its options. ValueError for either if unknown."""
    return Reduce(name, _find(name, "reduce", REDUCES, TRANSFORMS), options)


def bind_transform(name: str, options: Mapping[str, Any] | None = None) -> Transform:
    """The transform of that name (or ``package.module:function``) with its options. ValueError for either if unknown."""
    return Transform(name, _find(name, "transform", TRANSFORMS, REDUCES), options)


def generator(seed: int, round: int, name: str, worker: int) -> torch.Generator:
    """The generator of one worker's mask for one parameter in one round: no two of them share a stream."""
    return seeds.generator(seed, round, name, worker)


def describe(name: str) -> dict[str, Any]:
    """What `isoloco methods` and docs/methods.md say of a rule: name, kind, summary, equation, scale, cost, bytes, source, options."""
    kind = "transform" if name in TRANSFORMS else "reduce"
    rule = _find(name, "rule", {**REDUCES, **TRANSFORMS}, {})
    kinds = option_kinds(rule)
    return {
        "name": name,
        "kind": kind,
        "summary": (inspect.getdoc(rule) or "").partition("\n")[0],
        "equation": "",
        "scale": f"{rule.scale}-like" if hasattr(rule, "scale") else "",
        "cost": "",
        "bytes": "",
        "source": "",
        **sections(rule),
        "options": {
            option: {"default": p.default, "takes": in_words(kinds.get(option, Any))}
            for option, p in option_parameters(rule).items()
        },
    }


def is_reduce(fn: Any) -> bool:
    """Whether a rule is a reduce (else: a transform), by its form. ValueError where it is neither."""
    if hasattr(fn, "encode") and hasattr(fn, "decode"):
        return True
    if not callable(fn):
        raise ValueError(f"{fn!r} is no rule: takes a function, or an object with encode and decode")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [p for p in inspect.signature(fn).parameters.values() if p.kind in positional]
    if len(inputs) not in (1, 2):
        raise ValueError(
            f"{getattr(fn, '__name__', fn)} takes {len(inputs)} positional arguments: a reduce takes two (deltas_WS, "
            "weights_W), a transform one (delta_S); options are keyword-only"
        )
    return len(inputs) == 2


def _find(name: str, kind: str, table: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    if name in other:
        raise ValueError(f"{name} is no {kind}; known: {', '.join(table)}")
    if ":" not in name:
        raise ValueError(unknown(kind, name, table))
    module, _, attribute = name.partition(":")
    try:
        rule = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} (package.module:function) cannot be imported: {error}") from error
    if kind != "rule" and is_reduce(rule) != (kind == "reduce"):
        raise ValueError(f"{name} has the form of a {'transform' if kind == 'reduce' else 'reduce'}, not of a {kind}")
    return rule


__all__ = [
    "REDUCES",
    "TRANSFORMS",
    "Additive",
    "AdditiveRule",
    "Reduce",
    "Transform",
    "bind_reduce",
    "bind_transform",
    "describe",
    "generator",
    "is_reduce",
    "joint",
    "register",
    "transform",
]
