"""What makes a function a rule: its facts, its options checked against its own signature, and the two bound forms.

A rule is plain mathematics. A joint reduce is ``fn(deltas_WS, weights_W, **options) -> [*S]``, an additive one a class
with ``encode`` and ``decode``, a transform ``fn(delta_S, **options) -> [*S]``; options are keyword-only arguments. Any
function of that form can be bound; the decorators below add facts (scale, degree, needs_matrix) and the care for dtypes
and shapes that the project's own rules share.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Degree = int | Callable[[Mapping[str, Any]], int]


class Within(NamedTuple):
    """A range for ``Annotated[float, Within(...)]``: what it says to a user, and whether a value lies in it."""

    words: str
    holds: Callable[[Any], bool]


Share = Annotated[float, Within("above 0 and at most 1", lambda value: 0 < value <= 1)]
Fraction = Annotated[float, Within("between 0 and 1", lambda value: 0 <= value <= 1)]
NonNegative = Annotated[float, Within("zero or more", lambda value: value >= 0)]


# --- making rules ---------------------------------------------------------------------------------------------------


def joint(*, scale: Literal["mean", "sum"] = "mean", degree: Degree = 1, needs_matrix: bool = False) -> Callable:
    """Make ``fn(deltas_WS, weights_W, **options)`` a reduce that sees all deltas together.

    ``scale`` says how the result grows with W: like their mean, or like their sum. A rule that ``needs_matrix`` gives the
    weighted mean of everything else. The function gets float32 (or float64) deltas; the input's dtype is returned.
    """

    def decorate(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @torch.no_grad()
        @functools.wraps(fn)
        def reduce(deltas_WS: Tensor, weights_W: Tensor | None = None, **options: Any) -> Tensor:
            check_options(fn, options)
            deltas, weights = as_float(deltas_WS), check_weights(deltas_WS, weights_W)
            if needs_matrix and not is_matrix(deltas_WS[0], options):
                return (torch.tensordot(weights, deltas, 1) / weights.sum()).to(deltas_WS.dtype)
            return fn(deltas, weights, **options).to(deltas_WS.dtype)

        return _state(reduce, scale=scale, degree=degree, needs_matrix=needs_matrix)

    return decorate


def transform(*, degree: Degree = 1, needs_matrix: bool = False) -> Callable:
    """Make ``fn(delta_S, **options)`` a transform; one that ``needs_matrix`` hands everything else back as it is.

    The function gets a float32 (or float64) tensor; the input's dtype is returned.
    """

    def decorate(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @torch.no_grad()
        @functools.wraps(fn)
        def apply(delta_S: Tensor, **options: Any) -> Tensor:
            check_options(fn, options)
            if needs_matrix and not is_matrix(delta_S, options):
                return delta_S
            return fn(as_float(delta_S), **options).to(delta_S.dtype).contiguous()

        return _state(apply, degree=degree, needs_matrix=needs_matrix)

    return decorate


def _state(fn: Callable[..., Tensor], **facts: Any) -> Callable[..., Tensor]:
    vars(fn).update(facts)
    return fn


@runtime_checkable
class AdditiveRule(Protocol):
    """A reduce that adds up: what each worker sends is summed over the workers, then decoded."""

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor: ...

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor: ...


class Additive:
    """Base of the project's additive rules: frozen keyword-only dataclasses whose fields are the options."""

    scale: ClassVar[Literal["mean", "sum"]] = "mean"
    degree: ClassVar[Degree] = 1
    needs_matrix: ClassVar[bool] = False
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    @property
    def channels(self) -> int:
        """K: tensors of the delta's shape that one worker sends."""
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


def check_weights(deltas_WS: Tensor, weights_W: Tensor | Sequence[float] | None) -> Tensor:
    """Weights as a tensor beside the deltas; all 1 where none are given."""
    workers, like = deltas_WS.shape[0], as_float(deltas_WS[:0])
    weights = torch.ones(workers) if weights_W is None else torch.as_tensor(weights_W)
    if weights.shape != (workers,):
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {workers} workers: takes one number each")
    weights = weights.to(like)
    if not (bool((weights >= 0).all()) and 0 < float(weights.sum()) < float("inf")):
        raise ValueError(f"weights: got {weights.tolist()}, takes zeros or more with a finite sum above zero")
    return weights


# --- bound rules ----------------------------------------------------------------------------------------------------


class _Bound:
    """A rule with its options."""

    def __init__(self, name: str, rule: Any, options: Mapping[str, Any] | None) -> None:
        given = dict(options or {})
        check_options(rule, given, name=name)
        self.name = name
        self.options = {key: p.default for key, p in option_parameters(rule).items()} | given
        self.rule = rule(**given) if isinstance(rule, type) else functools.partial(rule, **given) if given else rule
        degree = getattr(rule, "degree", 1)
        self.degree: int = degree(self.options) if callable(degree) else degree
        self.needs_matrix: bool = getattr(rule, "needs_matrix", False)
        self.source = sections(rule).get("source", "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.options})"


class Transform(_Bound):
    """A transform with its options: ``[*S] -> [*S]``, dtype kept."""

    def __call__(self, delta_S: Tensor) -> Tensor:
        return self.rule(delta_S)


class Reduce(_Bound):
    """A reduce with its options: ``[W, *S] -> [*S]``, dtype kept.

    ``additive`` rules also have ``encode``, ``decode``, ``channels`` (K) and ``summed`` (how many leading channels add up to
    the coded delta); their call on stacked deltas is derived from encode and decode. ``scale`` is "mean" or "sum".
    """

    def __init__(self, name: str, rule: Any, options: Mapping[str, Any] | None) -> None:
        super().__init__(name, rule, options)
        self.additive = isinstance(self.rule, AdditiveRule)
        self.scale: Literal["mean", "sum"] = getattr(rule, "scale", "mean")
        self.random: bool = getattr(rule, "random", False)
        self.channels: int = getattr(self.rule, "channels", 1)
        self.summed: int = getattr(self.rule, "summed", self.channels)

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """What a worker of this weight sends, ``[K, *S]`` float32 (or float64); may share memory with the delta."""
        return self.rule.encode(delta_S, weight=weight, generator=generator)

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor:
        """The reduced delta from the sum of what was sent and the sum of the weights."""
        return self.rule.decode(total_KS, total_weight)

    def __call__(
        self,
        deltas_WS: Tensor,
        weights_W: Tensor | Sequence[float] | None = None,
        *,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Tensor:
        """Reduce stacked deltas; rules that draw (``random``) take one generator for each worker."""
        if deltas_WS.ndim == 0 or deltas_WS.shape[0] == 0:
            raise ValueError(
                f"{self.name} takes the deltas of at least one worker, [W, *S]; got {list(deltas_WS.shape)}"
            )
        weights = check_weights(deltas_WS, weights_W)
        if not self.additive:
            return self.rule(deltas_WS, weights)
        if self.random and generators is None:
            raise ValueError(f"{self.name} draws its masks: give it generators=[...], one for each worker")
        keys = [None] * len(deltas_WS) if generators is None else list(generators)
        total = None
        for delta_S, weight, key in zip(deltas_WS, weights.tolist(), keys, strict=True):
            coded = self.encode(delta_S, weight=weight, generator=key)
            total = coded.clone() if total is None else total.add_(coded)
        assert total is not None
        return self.decode(total, float(weights.sum())).to(deltas_WS.dtype)


# --- options --------------------------------------------------------------------------------------------------------


def option_parameters(rule: Any) -> dict[str, inspect.Parameter]:
    """The options of a rule: the keyword-only arguments of its signature."""
    if not callable(rule):  # an additive rule that is an object already
        return {}
    return {name: p for name, p in inspect.signature(rule).parameters.items() if p.kind is p.KEYWORD_ONLY}


def check_options(rule: Any, options: Mapping[str, Any], *, name: str | None = None) -> None:
    """ValueError for options that the rule does not have, or whose values are of another type or out of range."""
    name, known = name or getattr(rule, "__name__", "rule").lower(), option_parameters(rule)
    for option in options:
        if option not in known:
            raise ValueError(f"{name} takes no option {option!r}; it takes {', '.join(known) or 'no options'}")
    if missing := [key for key, p in known.items() if p.default is p.empty and key not in options]:
        raise ValueError(f"{name} needs the option {missing[0]!r}")
    kinds = option_kinds(rule)
    for option, value in options.items():
        if not _fits(value, kinds.get(option, Any)):
            raise ValueError(f"{name}: {option} is {value!r}, takes {in_words(kinds[option])}")


@functools.cache
def option_kinds(rule: Any) -> dict[str, Any]:
    """Option -> its annotation; options of a user's function whose annotations cannot be resolved have none."""
    try:
        return typing.get_type_hints(rule, include_extras=True)
    except (NameError, TypeError):
        return {}


def _fits(value: Any, kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limits = [limit for limit in args[1:] if isinstance(limit, Within)]
        return _fits(value, args[0]) and all(limit.holds(value) for limit in limits)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arm) for arm in args)
    if origin is dict:
        return isinstance(value, Mapping) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return kind not in (bool, str, types.NoneType) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    """What an option takes, for messages and tables."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return " ".join([in_words(args[0]), *(limit.words for limit in args[1:] if isinstance(limit, Within))])
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, args))
    if origin is dict:
        return f"{{{in_words(args[0])}: {in_words(args[1])}}}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


# --- documentation --------------------------------------------------------------------------------------------------


def sections(rule: Any) -> dict[str, str]:
    """The fixed sections of a rule's docstring (``Equation: ...``), by their lower-case names."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(rule) or "").splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in ("Equation", "Cost", "Bytes", "Source"):
            name, found[head.lower()] = head.lower(), rest.strip()
        elif name and line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found
