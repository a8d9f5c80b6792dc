"""The search for a cell's optimum: ladders, climbed one axis after the other. Pure functions of the losses so far."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

Point = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A ladder: start x factor^k, or start + step k; or a list of values."""

    key: str
    start: float = 0.0
    factor: float | None = None
    step: float | None = None
    values: tuple[float, ...] | None = None
    low: float = float("-inf")
    high: float = float("inf")

    def value(self, k: int) -> float | None:
        """The rung k steps from the start; None off the ladder."""
        if self.values is not None:
            return self.values[k] if 0 <= k < len(self.values) else None
        raw = self.start * self.factor**k if self.factor else self.start + (self.step or 0.0) * k
        value = float(f"{raw:.3g}")
        return value if self.low <= value <= self.high else None


def climb(axes: tuple[Axis, ...], losses: dict[Point, float], trials: int) -> list[Point]:
    """The points to try next, given the losses so far; empty when the search is over.

    From the origin, along one axis after the other: the neighbours of the best that are not known yet. When all are
    (the optimum is inside), the nearest unknown points around it, until ``trials`` points are known.
    """
    if not axes:
        return []
    origin: Point = (0,) * len(axes)
    if origin not in losses:
        return [origin]
    left = trials - len(losses)
    best = best_point(losses)
    for i in range(len(axes)):
        wanted = [p for p in _neighbours(axes, best, i) if p not in losses]
        if wanted:
            return wanted[: max(left, 0)]
    for distance in itertools.count(2):
        ring = [p for p in _ring(axes, best, distance) if p not in losses]
        if ring or distance > 6 + trials:
            return ring[: max(left, 0)]
    raise AssertionError("unreachable")


def best_point(losses: dict[Point, float]) -> Point:
    """The point of the lowest loss (of equal ones the first in order); what is not finite never wins."""
    return min(losses, key=lambda p: (losses[p] if losses[p] == losses[p] else float("inf"), p))


def inside(axes: tuple[Axis, ...], losses: dict[Point, float]) -> bool:
    """Whether every neighbour of the best point on every axis was tried (or is off a bounded ladder)."""
    best = best_point(losses)
    return all(p in losses for i in range(len(axes)) for p in _neighbours(axes, best, i))


def _neighbours(axes: tuple[Axis, ...], point: Point, i: int) -> list[Point]:
    steps = ((*point[:i], point[i] + d, *point[i + 1 :]) for d in (1, -1))
    return [p for p in steps if axes[i].value(p[i]) is not None]


def _ring(axes: tuple[Axis, ...], centre: Point, distance: int) -> list[Point]:
    """Points at that city-block distance, nearest to the diagonal first."""
    offsets = itertools.product(range(-distance, distance + 1), repeat=len(axes))
    ring = [o for o in offsets if sum(map(abs, o)) == distance]
    points = [
        tuple(c + d for c, d in zip(centre, o, strict=True)) for o in sorted(ring, key=lambda o: (max(map(abs, o)), o))
    ]
    return [p for p in points if all(axis.value(k) is not None for axis, k in zip(axes, p, strict=True))]
