"""The laws that every rule keeps, for the project's own and for yours: ``check_rule("ties")``, ``check_rule(mine)``.

Each law is a function and raises AssertionError with its name, the case and the numbers. The algebraic ones use float64
input, where rounding hides nothing. Results are compared in norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rules
from .rules.base import Reduce, Transform, is_matrix

SHAPES = ((), (0,), (5,), (0, 3), (1, 1), (1, 6), (6, 1), (6, 6), (5, 12), (12, 5), (3, 4, 6))
WORKERS = (1, 3)

Bound = Reduce | Transform


def check_rule(rule: Any, *, tolerance: float = 1e-6, device: str = "cpu", **options: Any) -> None:
    """Hold a rule to its laws.

    ``rule`` is a name, a joint reduce ``fn(deltas_WS, weights_W, **options)``, an additive one (a class or an object
    with ``encode`` and ``decode``), or a transform ``fn(delta_S, **options)``; ``options`` are its own. ``tolerance``
    is relative to the norm of the result; rules that round inside (bfloat16 products) need a wider one. AssertionError
    says which law fails, where, and by how much.
    """
    bound = rules.bind(rule, options)
    case = Case(bound, tolerance, device)
    for law in laws(bound):
        law(case)


def laws(bound: Bound) -> list[Callable[[Case], None]]:
    """The laws that apply to a rule."""
    found: list[Callable[[Case], None]] = [
        keeps_shape_and_dtype, ignores_layout, is_odd, is_homogeneous, rounds_once, stays_finite,
        passes_what_is_no_matrix,
    ]  # fmt: skip
    if isinstance(bound, Reduce):
        found += [ignores_order_of_workers, weighs_relatively, scales_as_declared]
        if bound.additive:
            found += [streams, ignores_absent_workers]
        if bound.random:
            found += [draws_from_the_generator]
    return found


class Case:
    """A bound rule, called the same way whether it is a reduce or a transform, and how exactly it is judged."""

    def __init__(self, rule: Bound, tolerance: float, device: str) -> None:
        self.rule, self.tolerance, self.device = rule, tolerance, device

    def __call__(self, x: Tensor, weights: Any = None, *, order: Sequence[int] | None = None) -> Tensor:
        """The rule's result; worker i of ``order`` draws from its own generator, wherever it stands."""
        if isinstance(self.rule, Transform):
            return self.rule(x)
        return self.rule(x, weights, generators=keys(range(len(x)) if order is None else order))

    def inputs(self, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
        """Gaussian entries in every shape: ``[*S]`` for a transform, ``[W, *S]`` for a reduce."""
        drawn = torch.Generator().manual_seed(0)
        for workers in (None,) if isinstance(self.rule, Transform) else WORKERS:
            for shape in SHAPES:
                full = shape if workers is None else (workers, *shape)
                yield torch.randn(full, generator=drawn, dtype=torch.float64).to(self.device, dtype)

    def same(self, law: str, got: Tensor, expected: Tensor, x: Tensor, *, tolerance: float | None = None) -> None:
        """AssertionError unless the two agree in norm."""
        allowed = self.tolerance if tolerance is None else tolerance
        norm = float(torch.linalg.vector_norm(expected.double()))
        error = float(torch.linalg.vector_norm(got.double() - expected.double()))
        if not error <= allowed * norm:
            self.fail(law, x, f"got {_brief(got)}, expected {_brief(expected)}: off by {error:.3g} of {norm:.3g}")

    def fail(self, law: str, x: Tensor, what: str) -> None:
        where = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise AssertionError(f"{self.rule.name} {self.rule.options or ''} breaks the law '{law}' at {where}: {what}")


def keys(workers: Sequence[int]) -> list[torch.Generator]:
    """The generators of these workers."""
    return [rules.generator(0, 0, "law", worker) for worker in workers]


# --- laws of every rule ---------------------------------------------------------------------------------------------


def keeps_shape_and_dtype(case: Case) -> None:
    """The result has the shape of one delta, the input's dtype and device; the input is as it was."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for x in case.inputs(dtype):
            before = x.clone()
            got = case(x)
            shape = x.shape if isinstance(case.rule, Transform) else x.shape[1:]
            if (got.shape, got.dtype, got.device) != (shape, x.dtype, x.device):
                case.fail("keeps shape, dtype and device", x, f"got {list(got.shape)} {got.dtype} on {got.device}")
            if not torch.equal(before, x):
                case.fail("leaves its input alone", x, "the input has changed")


def ignores_layout(case: Case) -> None:
    """Strides do not matter, and the result of a contiguous input is contiguous."""
    for x in case.inputs():
        if not (got := case(x)).is_contiguous():
            case.fail("contiguous in, contiguous out", x, f"strides {got.stride()}")
        spread = torch.stack([x, x.neg()], dim=-1)[..., 0]
        case.same("ignores strides", case(spread), got, x)
        if x.ndim > 1:
            case.same("ignores strides", case(x.transpose(-1, -2).contiguous().transpose(-1, -2)), got, x)


def is_odd(case: Case) -> None:
    """f(-x) = -f(x)."""
    for x in case.inputs():
        case.same("odd", case(-x), -case(x), x)


def is_homogeneous(case: Case) -> None:
    """f(c x) = c^degree f(x) for c > 0."""
    for x in case.inputs():
        for c in (0.3, 700.0):
            applies = case.rule.degree if _applies(case, x) else 1
            case.same(f"homogeneous of degree {applies}", case(c * x), c**applies * case(x), x)


def rounds_once(case: Case) -> None:
    """bfloat16 and float16 give the float32 result of the same numbers, rounded."""
    for dtype in (torch.bfloat16, torch.float16):
        for x in case.inputs(dtype):
            case.same("rounds once", case(x), case(x.float()).to(dtype), x, tolerance=2 * torch.finfo(dtype).eps)


def stays_finite(case: Case) -> None:
    """Zeros give zeros; repeated rows, one rank, very large and very small entries give finite numbers."""
    for x in case.inputs(torch.float32):
        if bool(case(torch.zeros_like(x)).any()):
            case.fail("zeros give zeros", x, _brief(case(torch.zeros_like(x))))
        flat = torch.ones_like(x)
        row = x[..., :1, :].expand_as(x) if x.ndim > 1 and x.numel() else x
        for name, value in {"equal entries": flat, "equal rows": row, "x 1e30": x * 1e30, "x 1e-30": x * 1e-30}.items():
            if not bool(torch.isfinite(case(value)).all()):
                case.fail(f"finite for {name}", x, _brief(case(value)))


def passes_what_is_no_matrix(case: Case) -> None:
    """A rule for matrices leaves everything else alone, or averages it."""
    for x in case.inputs():
        if not _applies(case, x):
            expected = x if isinstance(case.rule, Transform) else x.mean(0)
            case.same("only matrices", case(x), expected, x)


# --- laws of reduces ------------------------------------------------------------------------------------------------


def ignores_order_of_workers(case: Case) -> None:
    """Workers have no order: each takes its delta, its weight and its generator along."""
    for x in case.inputs():
        weights = torch.arange(1.0, len(x) + 1)
        for order in (torch.arange(len(x)).roll(1), torch.arange(len(x)).flip(0)):
            got = case(x[order], weights[order], order=order.tolist())
            case.same("ignores the order of workers", got, case(x, weights), x)


def weighs_relatively(case: Case) -> None:
    """Only ratios of weights matter, and equal ones are none."""
    for x in case.inputs():
        weights = torch.arange(1.0, len(x) + 1)
        case.same("equal weights are none", case(x, [2.5] * len(x)), case(x), x)
        case.same("weights are ratios", case(x, 3 * weights), case(x, weights), x)


def scales_as_declared(case: Case) -> None:
    """Mean-like: more equal deltas are no larger step. Sum-like: deltas that share no row and no column add up."""
    assert isinstance(case.rule, Reduce)
    drawn = torch.Generator().manual_seed(1)
    if case.rule.scale == "mean":
        x = torch.randn(12, 20, generator=drawn, dtype=torch.float64).to(case.device)
        few, many = (float(torch.linalg.vector_norm(case(x.expand(workers, -1, -1)))) for workers in (4, 64))
        # a sum grows 16 times; what masks drop, and directions that workers have apart, may grow a little
        if not many <= 8 * few:
            case.fail("mean-like", x, f"norm {few:.4g} for 4 equal workers, {many:.4g} for 64")
        return
    for workers in (2, 4, 8):
        x = torch.zeros(workers, 24, 40, dtype=torch.float64)
        for i in range(workers):
            column, row = torch.randn(2, 3, generator=drawn, dtype=torch.float64)
            x[i, 3 * i : 3 * i + 3, 5 * i : 5 * i + 3] = torch.outer(column, row)
        x = x.to(case.device)
        alone = [case(x[i : i + 1], order=[i]) for i in range(workers)]
        case.same("sum-like", case(x), torch.stack(alone).sum(0), x)


# --- laws of additive and of random reduces -------------------------------------------------------------------------


def streams(case: Case) -> None:
    """Summing what the workers send, in any order, then decoding is the stacked call; weights enter linearly."""
    rule = case.rule
    assert isinstance(rule, Reduce)
    for x in case.inputs():
        weights = torch.arange(1.0, len(x) + 1).tolist()
        coded = [rule.encode(d, weight=w, generator=g) for d, w, g in zip(x, weights, keys(range(len(x))), strict=True)]
        shape = [rule.channels, *x.shape[1:]]
        if [list(c.shape) for c in coded] != [shape] * len(x) or coded[0].dtype != x.dtype:
            case.fail("encode gives [K, *S]", x, f"got {list(coded[0].shape)} {coded[0].dtype}, K = {rule.channels}")
        total = torch.stack(coded[::-1]).sum(0)
        case.same("stacked = streamed", rule.decode(total, sum(weights)), case(x, weights), x)
        one = rule.encode(x[-1], weight=1.0, generator=keys([len(x) - 1])[0])
        case.same("encode is linear in the weight", coded[-1], weights[-1] * one, x)
        low = rule.encode(x[0].bfloat16(), generator=keys([0])[0])
        if low.dtype != torch.float32:
            case.fail("encodes in float32", x, f"got {low.dtype} for bfloat16")


def ignores_absent_workers(case: Case) -> None:
    """A worker of weight 0 is not there."""
    for x in case.inputs():
        weights = torch.arange(0.0, len(x))
        if len(x) > 1:
            got = case(x[1:], weights[1:], order=range(1, len(x)))
            case.same("weight 0 is absence", case(x, weights), got, x)


def draws_from_the_generator(case: Case) -> None:
    """The same generators give the same result, those of another worker or round another; none is an error."""
    assert isinstance(case.rule, Reduce)
    x = torch.ones(1, 40, 50, device=case.device)
    case.same("drawn from the generator alone", case(x), case(x), x, tolerance=0.0)
    others = {"worker": (0, 0, "law", 1), "round": (0, 1, "law", 0), "parameter": (0, 0, "other", 0)}
    for other, key in others.items():
        if torch.equal(case(x), case.rule(x, generators=[rules.generator(*key)])):
            case.fail(f"another {other} draws anew", x, "the results are equal")
    try:
        case.rule(x)
    except ValueError:
        return
    case.fail("asks for generators", x, "drew without one")


def _applies(case: Case, x: Tensor) -> bool:
    delta_S = x if isinstance(case.rule, Transform) else x[0]
    return not case.rule.needs_matrix or is_matrix(delta_S, case.rule.options)


def _brief(x: Tensor) -> str:
    shown = ", ".join(f"{value:.4g}" for value in x.flatten()[:4].tolist())
    return f"[{shown}{', ...' if x.numel() > 4 else ''}]"
