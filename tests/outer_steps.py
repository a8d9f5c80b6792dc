"""What the tests of the outer optimizer share: anchors, and deltas that depend on the round alone."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = [(7, 5), (4, 9), (6,), (1,), (3, 4, 2), ()]


def anchors(seed: int = 0) -> list[Tensor]:
    """Plain tensors, as the trainer's anchors are: nothing requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give(params: list[Tensor], round: int) -> None:
    """Set deltas that depend on the round alone."""
    generator = torch.Generator().manual_seed(1000 + round)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, rounds: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for round in rounds:
        give(params, round)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def half(delta_S: Tensor) -> Tensor:
    """A transform of a user's own: ``outer_steps:half``."""
    return delta_S / 2
