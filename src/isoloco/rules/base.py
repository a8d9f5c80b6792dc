"""What makes a function a rule: its facts, the care for dtypes and shapes, and the two bound forms.

A rule is plain mathematics in one of three forms, with keyword-only arguments as its options:

    joint reduce      fn(deltas_WS, weights_W, **options) -> [*S]
    additive reduce   a class (or an object) with encode and decode: what the workers send is summed on the way
    transform         fn(delta_S, **options) -> [*S]

Any function of such a form can be bound. The decorators state what cannot be told from it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from .options import check_options, option_parameters

Rule = Callable[..., Tensor]
Degree = int | Callable[[Mapping[str, Any]], int]
Check = Callable[[Mapping[str, Any]], None]


def joint(*, scale: Literal["mean", "sum"] = "mean", degree: Degree = 1, needs_matrix: bool = False) -> Callable:
    """Make ``fn(deltas_WS, weights_W, **options)`` a reduce that sees all deltas together.

    ``scale``: as W grows the result behaves like the deltas' mean, or like their sum. ``degree``: f(c x) = c^degree
    f(x), a number or a function of the options. With ``needs_matrix`` anything but a matrix gets the weighted mean. The
    function gets float32 (or float64) deltas and weights; the result has the input's dtype.
    """

    def decorate(fn: Rule) -> Rule:
        name = getattr(fn, "__name__", "rule")

        @torch.no_grad()
        @functools.wraps(fn)
        def reduce(deltas_WS: Tensor, weights_W: Tensor | Sequence[float] | None = None, **options: Any) -> Tensor:
            check_options(fn, options, name=name)
            floats_WS, weights = as_float(deltas_WS), check_weights(weights_W, deltas_WS)
            if needs_matrix and not is_matrix(deltas_WS[0], options):
                return (torch.tensordot(weights, floats_WS, 1) / weights.sum()).to(deltas_WS.dtype)
            return fn(floats_WS, weights, **options).to(deltas_WS.dtype).contiguous()

        vars(reduce).update(scale=scale, degree=degree, needs_matrix=needs_matrix)
        return reduce

    return decorate


def transform(*, degree: Degree = 1, needs_matrix: bool = False, check: Check | None = None) -> Callable:
    """Make ``fn(delta_S, **options)`` a transform.

    With ``needs_matrix`` anything but a matrix passes as it is. ``check`` gets all options when the rule is bound, and
    raises ValueError for those that do not fit together. The function gets a float32 (or float64) tensor; the result
    has the input's dtype.
    """

    def decorate(fn: Rule) -> Rule:
        name = getattr(fn, "__name__", "rule")

        @torch.no_grad()
        @functools.wraps(fn)
        def apply(delta_S: Tensor, **options: Any) -> Tensor:
            check_options(fn, options, name=name)
            if needs_matrix and not is_matrix(delta_S, options):
                return delta_S
            return fn(as_float(delta_S), **options).to(delta_S.dtype).contiguous()

        vars(apply).update(degree=degree, needs_matrix=needs_matrix, check=check)
        return apply

    return decorate


class AdditiveRule(Protocol):
    """A reduce that adds up: what each worker sends is summed over the workers, then decoded."""

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor: ...

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor: ...


class Additive:
    """Base of the project's additive rules: frozen keyword-only dataclasses, whose fields are the options."""

    scale: ClassVar[Literal["mean", "sum"]] = "mean"
    random: ClassVar[bool] = False  # whether encode draws from a generator
    entrywise: ClassVar[bool] = False  # whether an entry's outcome depends on that entry's deltas alone

    def __post_init__(self) -> None:
        check_options(type(self), vars(self), name=type(self).__name__)

    @property
    def channels(self) -> int:
        """K: how many tensors of the delta's shape a worker sends."""
        return 1

    @property
    def summed(self) -> int:
        """How many of the leading channels add up to the coded delta."""
        return 1


def as_float(x: Tensor) -> Tensor:
    """The tensor in the dtype that rules compute in: float64 stays, everything below becomes float32."""
    if not x.is_floating_point():
        raise ValueError(f"rules take floating-point deltas, got {x.dtype}; convert them first")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_matrix(x: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether a rule for matrices applies: two dimensions, or three with ``batched``, and at least one entry."""
    return x.numel() > 0 and (x.ndim == 2 or (x.ndim == 3 and bool(options.get("batched"))))


def check_weights(weights_W: Tensor | Sequence[float] | None, deltas_WS: Tensor) -> Tensor:
    """Weights as a tensor beside the deltas, all 1 where none are given. ValueError for numbers that cannot weigh."""
    like = as_float(deltas_WS[:0])
    workers = (len(deltas_WS),)
    weights = like.new_ones(workers) if weights_W is None else torch.as_tensor(weights_W).to(like)
    if weights.shape != workers:
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {workers[0]} workers: takes one number for each")
    if not ((weights >= 0).all() and 0 < weights.sum() < torch.inf):
        raise ValueError(f"weights: got {weights.tolist()}, takes zeros or more, with a finite sum above zero")
    return weights


class _Bound:
    """A rule with its options: all of them, those that were not given with their defaults."""

    def __init__(self, name: str, rule: Any, options: Mapping[str, Any] | None) -> None:
        given = dict(options or {})
        check_options(rule, given, name=name)
        self.name = name
        self.options = {option: p.default for option, p in option_parameters(rule).items()} | given
        if check := getattr(rule, "check", None):
            check(self.options)
        # a function keeps its options here, a class of additive rules takes them now, an object has none
        self.rule: Any = (
            rule(**given) if isinstance(rule, type) else functools.partial(rule, **given) if given else rule
        )
        self.degree = _degree(getattr(rule, "degree", 1), self.options)
        self.needs_matrix: bool = getattr(rule, "needs_matrix", False)
        self.source = sections(rule).get("source", "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.options})"


class Transform(_Bound):
    """A transform with its options: ``[*S] -> [*S]``, dtype kept; what it leaves alone comes back as it was."""

    def __init__(self, name: str, rule: Any, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, rule if hasattr(rule, "needs_matrix") else transform()(rule), options)

    def __call__(self, delta_S: Tensor) -> Tensor:
        return self.rule(delta_S)


class Reduce(_Bound):
    """A reduce with its options: ``[W, *S] -> [*S]``, dtype kept; ``scale`` is "mean" or "sum".

    ``additive`` rules have ``encode``, ``decode``, ``channels`` (K) and ``summed`` (how many leading channels add up to
    the coded delta); their call on stacked deltas is derived from encode and decode.
    """

    def __init__(self, name: str, rule: Any, options: Mapping[str, Any] | None = None) -> None:
        self.additive = hasattr(rule, "encode")
        plain = not self.additive and not hasattr(rule, "scale")
        super().__init__(name, joint()(rule) if plain else rule, options)
        self.scale: Literal["mean", "sum"] = getattr(rule, "scale", "mean")
        self.random: bool = getattr(rule, "random", False)
        self.entrywise: bool = getattr(rule, "entrywise", False)
        self.channels: int = getattr(self.rule, "channels", 1)
        self.summed: int = getattr(self.rule, "summed", self.channels)

    @torch.no_grad()
    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """What a worker of this weight sends: ``[K, *S]`` in float32 (float64 if the delta is), maybe a view of it."""
        return self.rule.encode(as_float(delta_S), weight=weight, generator=generator)

    @torch.no_grad()
    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor:
        """The reduced delta ``[*S]``, from the sums over the workers of what they sent and of their weights."""
        return self.rule.decode(total_KS, total_weight)

    def __call__(
        self,
        deltas_WS: Tensor,
        weights_W: Tensor | Sequence[float] | None = None,
        *,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Tensor:
        """Reduce stacked deltas; a rule that draws (``random``) takes one generator for each worker."""
        if deltas_WS.ndim == 0 or len(deltas_WS) == 0:
            raise ValueError(
                f"{self.name} takes the deltas of one worker or more, [W, *S]; got {list(deltas_WS.shape)}"
            )
        if not self.additive:
            return self.rule(deltas_WS, weights_W)
        if self.random and generators is None:
            raise ValueError(f"{self.name} draws its masks: give it generators=[...], one for each worker")
        weights = check_weights(weights_W, deltas_WS).tolist()
        keys = generators or [None] * len(weights)
        total_KS = None
        for delta_S, weight, key in zip(deltas_WS, weights, keys, strict=True):
            coded_KS = self.encode(delta_S, weight=weight, generator=key)
            total_KS = coded_KS.clone() if total_KS is None else total_KS.add_(coded_KS)
        assert total_KS is not None
        return self.decode(total_KS, sum(weights)).to(deltas_WS.dtype)


def _degree(stated: Degree, options: Mapping[str, Any]) -> int:
    return stated(options) if callable(stated) else stated


def sections(rule: Any) -> dict[str, str]:
    """The fixed sections of a rule's docstring by lower-case name: ``Equation: ...``, further lines indented."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(rule.__doc__ or "").splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in ("Equation", "Cost", "Bytes", "Source"):
            name, found[head.lower()] = head.lower(), rest.strip()
        elif name and line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found
