"""Rules for matrices: TSV and Iso-CTS over all workers' deltas; Iso-C and its clipped forms on one."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .base import Fraction, NonNegative, Share, joint, transform
from .polar import mean_singular_value
from .polar import polar as polar_factor

TOLERANCE = 4 * torch.finfo(torch.float32).eps
"""Singular values up to this part of the largest one are rounding of float32 input: their directions are noise."""


@joint(scale="sum", needs_matrix=True)
def tsv(
    deltas_WMN: Tensor, weights_W: Tensor, *, rank_fraction: Share | None = None, decorrelate: bool = True
) -> Tensor:
    """TSV-M: each worker's leading singular triples, their singular vectors decorrelated across the workers, summed.

    Each delta keeps max(1, int(rank_fraction * r)) triples, r = min(M, N), 1/W of them where nothing is said. The sets of
    left and of right vectors are whitened: replaced by their polar factors (not with ``decorrelate=False``). Weights are
    taken relative to their mean, so equal ones give the plain rule; one worker's delta is returned as it is. W equal
    deltas give one truncated delta; orthogonal ones add up. Vectors are averaged.

    Equation: U = polar([U_1 .. U_W]), V = polar([V_1 .. V_W]), U diag(w_1 S_1 .. w_W S_W) V^T, (w averaging 1)
    Cost: W + 2 singular value decompositions, in float64: truncation is sensitive where singular values are close
    Bytes: every worker's delta
    Source: Sections 2.2 and 3.2; Gargiulo et al. (2025)
    """
    workers, rows, columns = deltas_WMN.shape
    if workers == 1:
        return deltas_WMN[0]
    kept = max(1, int((rank_fraction or 1 / workers) * min(rows, columns)))
    triples = [
        _leading(weight * delta_MN.double(), kept)
        for weight, delta_MN in zip((weights_W / weights_W.mean()).tolist(), deltas_WMN, strict=True)
    ]
    left_MK, sigma_K, right_NK = (torch.cat(parts, -1) for parts in zip(*triples, strict=True))
    if decorrelate:
        left_MK, right_NK = _whiten(left_MK), _whiten(right_NK)
    return (left_MK * sigma_K) @ right_NK.mT


@joint(scale="mean", needs_matrix=True)
def iso_cts(deltas_WMN: Tensor, weights_W: Tensor, *, common_fraction: Fraction = 0.8) -> Tensor:
    """Iso-CTS: the leading directions of the mean, completed by each worker's own, all of one singular value.

    Of r = min(M, N) directions int(common_fraction * r) are the mean delta's; the others are shared out evenly, n for each
    worker (as many as fit: n = min(round(others / W), r // W)), taken from what the common left directions leave of its
    delta; those that cannot be shared out stay common. With more workers than directions it is Iso-C. Mean-like; weights
    sum to 1 before anything else. Vectors are averaged.

    Equation: C = mean's r - n W triples, T_i = n triples of (I - U_C U_C^T) w_i delta_i; mean(sigma) polar(U) polar(V)^T
    Cost: W + 3 singular value decompositions, in float64: truncation is sensitive where singular values are close
    Bytes: every worker's delta
    Source: Sections 2.2 and 3.2; Marczak et al. (2025)
    """
    workers, rows, columns = deltas_WMN.shape
    rank = min(rows, columns)
    own = min(round((rank - int(common_fraction * rank)) / workers), rank // workers)
    shares_WMN = deltas_WMN.double() * (weights_W / weights_W.sum()).double()[:, None, None]
    triples = [_leading(shares_WMN.sum(0), rank - own * workers)]
    common_MK = triples[0][0]
    for share_MN in shares_WMN if own else ():
        rest_MN = share_MN - common_MK @ (common_MK.mT @ share_MN)
        triples.append(_leading(rest_MN, own, smallest=TOLERANCE * float(torch.linalg.matrix_norm(share_MN))))
    left_MK, sigma_K, right_NK = (torch.cat(parts, -1) for parts in zip(*triples, strict=True))
    return sigma_K.sum() / rank * (_whiten(left_MK) @ _whiten(right_NK).mT)


def _leading(x_MN: Tensor, kept: int, *, smallest: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triples, ``[M, K], [K], [N, K]``: at most ``kept``, and none that is noise."""
    left_MR, sigma_R, right_RN = torch.linalg.svd(x_MN, full_matrices=False)
    above = int((sigma_R > max(smallest, TOLERANCE * float(sigma_R[0]))).sum())
    kept = min(kept, above)
    return left_MR[:, :kept], sigma_R[:kept], right_RN[:kept].mT


def _whiten(vectors_MK: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (rows, if there are more columns than rows)."""
    return polar_factor(vectors_MK, "svd") if vectors_MK.numel() else vectors_MK


@transform()
def none(delta_S: Tensor) -> Tensor:
    """The reduced delta as it is.

    Equation: delta
    Cost: nothing
    Bytes: nothing
    Source: Section 2.1, Algorithm 1
    """
    return delta_S


@transform(needs_matrix=True, degree=lambda options: 0 if options.get("scale") == "spectral" else 1)
def iso_c(
    delta_MN: Tensor,
    *,
    scale: Literal["mean", "rms", "spectral"] = "mean",
    polar: str | dict[str, str] = "auto",
    rank_tolerance: NonNegative | None = None,
    transposed: bool = False,
    batched: bool = False,
) -> Tensor:
    """Iso-C: every singular value becomes their mean, so that no direction dominates the step.

    ``scale`` is the mean singular value, from <U V^T, X> = sum(sigma) after any polar method; ``rms`` the paper's proxy for
    it, |X|_F / sqrt(r); ``spectral`` Muon's sqrt(fan_out / fan_in), for weights stored [out, in] or, with ``transposed``,
    [in, out]. ``polar`` and ``rank_tolerance`` are those of :func:`isoloco.rules.polar.polar`. The mean divides by
    r = min(M, N), null directions included. 3-D tensors pass, or with ``batched`` are matrices over the first axis.

    Equation: mean(sigma) U V^T, with X = U diag(sigma) V^T
    Cost: one polar factor: a singular value decomposition, or a few matrix products
    Bytes: nothing
    Source: Section 4, Algorithm 2; the fast form Section 4.3; scales Appendix B; Marczak et al. (2025)
    """
    uv_MN = polar_factor(delta_MN, polar, rank_tolerance=rank_tolerance)
    rows, columns = delta_MN.shape[-2:]
    if scale == "spectral":
        return math.sqrt(columns / rows if transposed else rows / columns) * uv_MN
    if scale == "rms":
        size = torch.linalg.matrix_norm(delta_MN.double()) / math.sqrt(min(rows, columns))
    else:
        size = mean_singular_value(delta_MN, uv_MN)
    return uv_MN * size.to(uv_MN.dtype)[..., None, None]


@transform(needs_matrix=True)
def clip_high(delta_MN: Tensor, *, batched: bool = False) -> Tensor:
    """Singular values above their mean become the mean, the others stay.

    Equation: U diag(min(sigma, mean(sigma))) V^T
    Cost: one singular value decomposition
    Bytes: nothing
    Source: Section 4.5
    """
    return _clip(delta_MN, torch.minimum)


@transform(needs_matrix=True)
def clip_low(delta_MN: Tensor, *, batched: bool = False) -> Tensor:
    """Singular values below their mean become the mean, the others stay; null directions stay null.

    Equation: U diag(max(sigma, mean(sigma))) V^T
    Cost: one singular value decomposition
    Bytes: nothing
    Source: Section 4.5
    """
    return _clip(delta_MN, torch.maximum)


def _clip(delta_MN: Tensor, towards: object) -> Tensor:
    left_MR, sigma_R, right_RN = torch.linalg.svd(delta_MN, full_matrices=False)
    mean = sigma_R.mean(-1, keepdim=True)
    clipped_R = towards(sigma_R, mean) * (sigma_R > TOLERANCE * sigma_R[..., :1])
    return (left_MR * clipped_R[..., None, :]) @ right_RN
