"""The rules: how the workers' deltas become one (reduces), and what is done to that one (transforms).

Pure functions of tensors. They know no names, ranks, files or momentum; they assume finite input, compute in float32 or
better, return the input's dtype, are odd, f(-x) = -f(x), and say how they scale. A rule of your own is one line here
for the project's, `register("name", fn)` or the name "package.module:function" for anybody's;
:func:`isoloco.testing.check_rule` holds either to the same laws.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .. import seeds
from ..config import unknown
from .base import Additive, AdditiveRule, Reduce, Rule, Transform, joint, sections, transform
from .elementwise import Dare, Mean, Ties
from .options import in_words, option_kinds, option_parameters
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
OWN = frozenset({*REDUCES, *TRANSFORMS})

__all__ = [
    "REDUCES",
    "TRANSFORMS",
    "Additive",
    "AdditiveRule",
    "Reduce",
    "Transform",
    "bind",
    "bind_reduce",
    "bind_transform",
    "describe",
    "generator",
    "is_reduce",
    "joint",
    "register",
    "transform",
]


def register(name: str, fn: Rule | AdditiveRule | type) -> None:
    """Make a rule known by a name, in this process; the same name again replaces it.

    ``fn`` is a joint reduce ``fn(deltas_WS, weights_W, **options)``, an additive one (a class or an object with
    ``encode`` and ``decode``), or a transform ``fn(delta_S, **options)``. Its keyword-only arguments are its options.
    ValueError for the name of one of the project's rules, and for what has none of these forms.
    """
    if name in OWN:
        raise ValueError(f"{name} is one of isoloco's own rules: register yours under another name")
    table, other = (REDUCES, TRANSFORMS) if is_reduce(fn) else (TRANSFORMS, REDUCES)
    other.pop(name, None)
    table[name] = fn


def bind_reduce(name: str, options: Mapping[str, Any] | None = None) -> Reduce:
    """The reduce of this name, or "package.module:function", with its options. ValueError if either is not known."""
    rule = _find(name, "reduce", REDUCES)
    if not is_reduce(rule):
        raise ValueError(f"{name} is a transform, not a reduce; known reduces: {', '.join(REDUCES)}")
    return Reduce(name, rule, options)


def bind_transform(name: str, options: Mapping[str, Any] | None = None) -> Transform:
    """The transform of this name, or "package.module:function", with its options. ValueError if either is not known."""
    rule = _find(name, "transform", TRANSFORMS)
    if is_reduce(rule):
        raise ValueError(f"{name} is a reduce, not a transform; known transforms: {', '.join(TRANSFORMS)}")
    return Transform(name, rule, options)


def bind(rule: Any, options: Mapping[str, Any] | None = None) -> Reduce | Transform:
    """A rule given by name or as itself, bound as what it is."""
    name, rule = (
        (rule, _find(rule)) if isinstance(rule, str) else (getattr(rule, "__name__", type(rule).__name__), rule)
    )
    return (Reduce if is_reduce(rule) else Transform)(name, rule, options)


def generator(seed: int, round: int, name: str, worker: int) -> torch.Generator:
    """What one worker draws from for one parameter in one round, whoever does the drawing; no two share a stream."""
    return seeds.generator(seed, round, name, worker)


def describe(name: str) -> dict[str, Any]:
    """A rule in words, from its docstring and its signature.

    Keys: name, kind ("reduce" or "transform"), summary, equation, scale, cost, bytes (sent by a worker), source, and
    options: for each its default and what it takes. ValueError for an unknown name.
    """
    rule = _find(name)
    reduce, kinds = is_reduce(rule), option_kinds(rule)
    found = sections(rule)
    scale = f"{getattr(rule, 'scale', 'mean')}-like" if reduce else "that of its input (degree 1)"
    return {
        "name": name,
        "kind": "reduce" if reduce else "transform",
        "summary": (inspect.getdoc(rule) or "").partition("\n")[0],
        "equation": found.get("equation", ""),
        "scale": scale,
        "cost": found.get("cost", ""),
        "bytes": found.get("bytes", ""),
        "source": found.get("source", ""),
        "options": {
            option: {"default": p.default, "takes": in_words(kinds.get(option, Any))}
            for option, p in option_parameters(rule).items()
        },
    }


def is_reduce(rule: Any) -> bool:
    """Whether a rule is a reduce or else a transform, told from its form. ValueError if it has neither."""
    if hasattr(rule, "encode") and hasattr(rule, "decode"):
        return True
    if not callable(rule) or isinstance(rule, type):
        raise ValueError(f"{rule!r} is no rule: takes a function, or an object or a class with encode and decode")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [p.name for p in inspect.signature(rule).parameters.values() if p.kind in positional]
    if len(inputs) not in (1, 2):
        raise ValueError(
            f"{getattr(rule, '__name__', rule)} takes {len(inputs)} positional arguments: a reduce takes two "
            "(deltas_WS, weights_W), a transform one (delta_S); make the others keyword-only"
        )
    return len(inputs) == 2


def _find(name: str, kind: str = "rule", table: Mapping[str, Any] | None = None) -> Any:
    """A rule of either kind by its name; an unknown one is named beside those of the kind that was asked for."""
    known = {**REDUCES, **TRANSFORMS}
    if name in known:
        return known[name]
    if ":" not in name:
        raise ValueError(unknown(kind, name, table or known))
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} (package.module:function) cannot be imported: {error}") from error
