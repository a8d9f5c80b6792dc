"""What a merge does to each tensor: reduce, transform, weights, scale; for all, or for those a pattern matches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..config import ReduceConfig, TransformConfig, unknown
from ..roles import select
from ..rules import Reduce, Transform, bind, bind_reduce, bind_transform

ScaleLike = Literal["mean", "sum"]
Overrides = Mapping[str, Any]
Where = Mapping[str, Overrides] | Callable[[str], Overrides]


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """How one tensor is merged; ``reduces`` holds one for each expert, which differ in their options at most."""

    reduces: tuple[Reduce, ...]
    weights: tuple[float, ...]
    transform: Transform | None
    scale: float
    scale_like: ScaleLike | None

    @property
    def factor(self) -> float:
        """What makes the reduced delta as large as a mean, or as a sum; 1 where it keeps its rule's own scale."""
        if self.scale_like is None:
            return 1.0
        mean = 1.0 if self.reduces[0].scale == "mean" else 1.0 / len(self.weights)
        return mean if self.scale_like == "mean" else mean * sum(self.weights)

    @property
    def entrywise(self) -> bool:
        """Whether any part of the tensor can be merged by itself."""
        return self.transform is None and all(reduce.entrywise for reduce in self.reduces)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a recipe says about a tensor, as plain data; names that ``where`` may override."""

    reduce: Any = "mean"
    transform: Any = "none"
    weights: Sequence[float] | None = None
    scale: float = 1.0
    scale_like: ScaleLike | None = None
    expert_options: Sequence[Mapping[str, Any]] | None = None


class Recipe:
    """Settings for all tensors, and ``where`` they are others: a mapping from roles and name globs, or a function.

    Of several patterns that match a tensor the later ones win. Roles (by parameter name) give the patterns something to
    match and keep vectors from transforms for matrices; ``transposed`` names weights that are stored [in, out].
    ValueError for what does not fit together, when the recipe is made.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        experts: int,
        where: Where | None = None,
        roles: Mapping[str, str],
        transposed: Collection[str] = (),
    ) -> None:
        self.experts, self.roles, self.transposed = experts, roles, transposed
        self.plain = _plain(settings)
        self._bound: dict[str, TensorRule] = {}
        self._overrides: Callable[[str], Overrides] = where if callable(where) else _matching(where or {}, roles)
        if not any(self._bind(self.plain).weights):
            raise ValueError("weights: all are 0, and nothing would be merged")
        if not callable(where):
            for overrides in (where or {}).values():
                self._bind(_overlay(self.plain, overrides))

    def rule(self, name: str) -> TensorRule:
        """How this tensor is merged."""
        settings = _overlay(self.plain, self._overrides(name))
        bound = self._bind(settings)
        transform = bound.transform
        if transform is None:
            return bound
        if transform.needs_matrix and self.roles.get(name) == "vector":
            return self._bind({**settings, "transform": ("none", {})})
        if name in self.transposed and "transposed" in transform.options:
            rule, options = settings["transform"]
            return self._bind({**settings, "transform": (rule, {**options, "transposed": True})})
        return bound

    def _bind(self, settings: dict[str, Any]) -> TensorRule:
        key = repr(sorted(settings.items()))
        if key not in self._bound:
            self._bound[key] = self._new(settings)
        return self._bound[key]

    def _new(self, settings: dict[str, Any]) -> TensorRule:
        rule, options = settings["reduce"]
        own = settings["expert_options"] or [{}] * self.experts
        if len(own) != self.experts:
            raise ValueError(f"expert_options: got {len(own)}, takes one mapping for each of {self.experts} experts")
        reduces = tuple(as_reduce(rule, {**options, **more}) for more in own)
        if any(own) and not (reduces[0].additive and len({reduce.channels for reduce in reduces}) == 1):
            raise ValueError(f"expert_options: {reduces[0].name} takes the same options for all experts")
        rule, options = settings["transform"]
        transform = bind_transform(rule, options) if isinstance(rule, str) else bind(rule, options)
        if not isinstance(transform, Transform):
            raise ValueError(f"transform: {transform.name} is a reduce")
        if settings["scale_like"] not in (None, "mean", "sum"):
            raise ValueError(f"scale_like: got {settings['scale_like']!r}, takes mean or sum")
        if not math.isfinite(settings["scale"]):
            raise ValueError(f"scale: got {settings['scale']!r}, takes a finite number")
        return TensorRule(
            reduces=reduces,
            weights=_weights(settings["weights"], self.experts),
            transform=None if transform.name == "none" else transform,
            scale=float(settings["scale"]),
            scale_like=settings["scale_like"],
        )


def _plain(settings: Settings) -> dict[str, Any]:
    """Settings with each rule as (name or function, options)."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for key, default in (("reduce", "mean"), ("transform", "none")):
        rule, options = named_rule(values[key])
        values[key] = (default if rule is None else rule, options)
    return values


def named_rule(rule: Any) -> tuple[Any, dict[str, Any]]:
    """A rule that was given in any form as (name or function, options); None for the name where there is none."""
    if isinstance(rule, ReduceConfig | TransformConfig):
        return rule.name, dict(rule.options or {})
    if isinstance(rule, Mapping):
        if more := sorted(rule.keys() - {"name", "options"}):
            raise ValueError(f"a rule takes name and options, got {', '.join(more)}")
        return rule.get("name"), dict(rule.get("options") or {})
    return rule, {}


def _overlay(settings: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Settings with some replaced; options alone are laid over those of the same rule."""
    if not overrides:
        return settings
    found = dict(settings)
    for key, value in overrides.items():
        if key not in settings:
            raise ValueError(unknown("setting", key, settings))
        if key not in ("reduce", "transform"):
            found[key] = value
            continue
        rule, options = named_rule(value)
        before, kept = found[key]
        found[key] = (before, {**kept, **options}) if rule is None or rule == before else (rule, options)
    return found


def _matching(where: Mapping[str, Overrides], roles: Mapping[str, str]) -> Callable[[str], Overrides]:
    chosen = {pattern: select([pattern], roles) for pattern in where}

    def overrides(name: str) -> Overrides:
        found: dict[str, Any] = {}
        for pattern, names in chosen.items():
            if name in names:
                found |= where[pattern]
        return found

    return overrides


def as_reduce(rule: Any, options: Mapping[str, Any]) -> Reduce:
    """A reduce by name or as a function, with its options."""
    if isinstance(rule, str):
        return bind_reduce(rule, options)
    bound = bind(rule, options)
    if not isinstance(bound, Reduce):
        raise ValueError(f"reduce: {bound.name} is a transform")
    return bound


def _weights(weights: Sequence[float] | None, experts: int) -> tuple[float, ...]:
    found = (1.0,) * experts if weights is None else tuple(float(weight) for weight in weights)
    if len(found) != experts:
        raise ValueError(f"weights: got {len(found)}, takes one number for each of {experts} experts")
    if not all(0 <= weight < math.inf for weight in found):
        raise ValueError(f"weights: got {list(found)}, takes numbers of zero or more")
    return found
