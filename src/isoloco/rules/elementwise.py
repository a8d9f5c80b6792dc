"""Additive rules, entry by entry: mean, TIES, DARE. What each worker sends is summed, then decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .base import Additive, Share, as_float

By = Literal["element", "row", "column"]


@dataclass(frozen=True, kw_only=True)
class Mean(Additive):
    """Mean of the workers' deltas: DiLoCo's own reduce.

    Equation: sum_i w_i delta_i / sum_i w_i
    Cost: one addition for each worker and entry
    Bytes: 1 tensor for each worker, adding up on the way
    Source: Section 2.1, Algorithm 1; FedAvg, McMahan et al. (2017)
    """

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """``w delta`` as ``[1, *S]``; a view of the delta where the weight is 1."""
        coded_S = as_float(delta_S)
        return (coded_S if weight == 1 else weight * coded_S).unsqueeze(0)

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor:
        """Sum over sum of weights, ``[*S]``."""
        return total_KS[0] / total_weight


class _Sparse(Additive):
    """Sparsify each delta, then rescale it or not, then average with or without an election of signs."""

    density: float
    by: By
    elect: bool
    rescale: bool

    def keep(self, delta_S: Tensor, generator: torch.Generator | None) -> tuple[Tensor, float]:
        """Which entries stay (bool, broadcastable to ``[*S]``), and the fraction of them that rescaling divides by."""
        raise AssertionError("every sparse rule keeps something")

    @property
    def channels(self) -> int:
        return 4 if self.elect else 1

    @property
    def summed(self) -> int:
        return 2 if self.elect else 1

    def encode(self, delta_S: Tensor, *, weight: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """``[1, *S]``: the weighted sparse delta; with election ``[4, *S]``: its positive and its negative part, and the
        weight where it is positive and where it is negative."""
        delta_S = as_float(delta_S)
        kept_S, fraction = self.keep(delta_S, generator)
        factor = weight / fraction if self.rescale else weight
        sparse_S = torch.where(kept_S, delta_S, 0)
        if not self.elect:
            return (sparse_S if factor == 1 else factor * sparse_S).unsqueeze(0)
        coded_KS = delta_S.new_empty(4, *delta_S.shape)
        torch.clamp(sparse_S, min=0, out=coded_KS[0])
        torch.clamp(sparse_S, max=0, out=coded_KS[1])
        coded_KS[:2] *= factor
        torch.gt(sparse_S, 0, out=coded_KS[2])
        torch.lt(sparse_S, 0, out=coded_KS[3])
        coded_KS[2:] *= weight
        return coded_KS

    def decode(self, total_KS: Tensor, total_weight: float) -> Tensor:
        """Mean over all workers, or over those whose sign won; an exact tie elects 0."""
        if not self.elect:
            return total_KS[0] / total_weight
        positive_S, negative_S, positive_weight_S, negative_weight_S = total_KS
        balance_S = positive_S + negative_S
        winner_S = torch.where(balance_S > 0, positive_S / positive_weight_S, negative_S / negative_weight_S)
        return torch.where(balance_S != 0, winner_S, 0)


@dataclass(frozen=True, kw_only=True)
class Ties(_Sparse):
    """TIES: keep each worker's largest entries, elect a sign for each entry, average those that agree with it.

    ``density`` is the part that is kept: k = max(1, int(density * numel)) entries of each tensor, or whole rows (slices of
    the first axis) or columns (of the last) by their norm; entries that tie with the k-th are kept too, so that the rule
    depends on nothing but the values. ``elect=False`` averages over all workers; ``rescale`` divides by the part kept.

    Equation: s = sign(sum_i w_i trim(delta_i)); mean of the trim(delta_i) whose sign is s, 0 where s = 0
    Cost: one selection of the k-th largest for each worker and tensor
    Bytes: 4 tensors for each worker (1 without election), adding up on the way
    Source: Section 2.2; Yadav et al. (2023)
    """

    density: Share = 0.9
    by: By = "element"
    elect: bool = True
    rescale: bool = False

    def keep(self, delta_S: Tensor, generator: torch.Generator | None) -> tuple[Tensor, float]:
        size_G = _sizes(delta_S, self.by)
        if size_G.numel() == 0:
            return size_G.bool(), 1.0
        kept = max(1, int(self.density * size_G.numel()))
        return size_G >= _kth_largest(size_G, kept), kept / size_G.numel()


@dataclass(frozen=True, kw_only=True)
class Dare(_Sparse):
    """DARE: drop entries at random, rescale the others so that the expectation stays, average.

    An entry stays with probability ``density``; ``by`` draws for whole rows (slices of the first axis) or columns (of the
    last). Masks come from the worker's own generator, keyed by seed, round, parameter and worker. ``elect`` elects signs
    as TIES does; ``rescale=False`` only drops.

    Equation: sum_i w_i m_i delta_i / (density sum_i w_i), m_i ~ Bernoulli(density)
    Cost: one random number for each worker and entry
    Bytes: 1 tensor for each worker (4 with election), adding up on the way
    Source: Section 2.2; Yu et al. (2024)
    """

    random = True

    density: Share = 0.9
    by: By = "element"
    elect: bool = False
    rescale: bool = True

    def keep(self, delta_S: Tensor, generator: torch.Generator | None) -> tuple[Tensor, float]:
        if generator is None:
            raise ValueError("dare draws its masks: give encode the worker's generator (rules.generator)")
        drawn_G = torch.rand(_groups(delta_S, self.by), generator=generator)
        return (drawn_G < self.density).to(delta_S.device), self.density


def _groups(delta_S: Tensor, by: By) -> list[int]:
    """The shape, broadcastable to ``[*S]``, that has one entry for everything that is kept or dropped together."""
    if by == "element" or delta_S.ndim == 0:
        return list(delta_S.shape)
    axis = 0 if by == "row" else delta_S.ndim - 1
    return [size if i == axis else 1 for i, size in enumerate(delta_S.shape)]


def _sizes(delta_S: Tensor, by: By) -> Tensor:
    """Magnitude of each entry, or norm of each row or column (float64, where large entries have finite squares)."""
    reduced = [i for i, (n, kept) in enumerate(zip(delta_S.shape, _groups(delta_S, by), strict=True)) if n != kept]
    if not reduced:
        return delta_S.abs()
    return torch.linalg.vector_norm(delta_S, dim=reduced, keepdim=True, dtype=torch.float64)


def _kth_largest(x: Tensor, k: int) -> Tensor | float:
    """The k-th largest value, by selection instead of a sort.

    32000 x 1024, k = 0.9 n, one thread: numpy's partition 0.15 s, torch's kthvalue 0.9 s (and indices of twice the size),
    topk 1.2 to 4.6 s.
    """
    smaller = x.numel() - k
    if x.device.type == "cpu":
        flat = x.flatten().numpy()
        return float(np.partition(flat, smaller)[smaller])
    return x.flatten().kthvalue(smaller + 1).values
