"""Rules for matrices: TSV and Iso-CTS over all workers' deltas, Iso-C and its clipped forms on the reduced one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .base import joint, transform
from .options import Density, Fraction
from .polar import RANK_TOLERANCE, mean_singular_value
from .polar import check as check_polar
from .polar import polar as polar_factor


@joint(scale="sum", needs_matrix=True)
def tsv(
    deltas_WMN: Tensor, weights_W: Tensor, *, rank_fraction: Density | None = None, decorrelate: bool = True
) -> Tensor:
    """TSV-M: each worker's leading singular triples, singular vectors decorrelated across the workers, summed.

    Each delta keeps max(1, int(rank_fraction * r)) of its r = min(M, N) triples, a fraction of 1/W where none is given.
    All left vectors side by side, and all right ones, are whitened: replaced by their polar factor (not with
    ``decorrelate=False``). Weights count relative to their mean, so that equal ones change nothing. One worker's delta
    comes back as it is. Deltas that share no direction add up; W equal ones give one, truncated. Vectors are averaged.

    Equation: U S V^T with U = polar([U_1 ... U_W]), V = polar([V_1 ... V_W]), S = diag(w_1 S_1, ..., w_W S_W) and
        U_i S_i V_i^T the truncated decomposition of delta_i, mean(w) = 1
    Cost: W + 2 singular value decompositions, in float64: cutting between two close singular values needs the digits
    Bytes: every worker's delta
    Source: Sections 2.2 and 3.2; Gargiulo et al. (2025)
    """
    workers, rows, columns = deltas_WMN.shape
    if workers == 1:
        return deltas_WMN[0].clone()
    kept = max(1, int((rank_fraction or 1 / workers) * min(rows, columns)))
    weighted = zip((weights_W.double() / weights_W.double().mean()).tolist(), deltas_WMN, strict=True)
    triples = [_leading(weight * delta_MN.double(), kept) for weight, delta_MN in weighted]
    left_MK, sigma_K, right_NK = (torch.cat(parts, dim=-1) for parts in zip(*triples, strict=True))
    if decorrelate:
        left_MK, right_NK = _whiten(left_MK), _whiten(right_NK)
    return (left_MK * sigma_K) @ right_NK.mT


@joint(scale="mean", needs_matrix=True)
def iso_cts(deltas_WMN: Tensor, weights_W: Tensor, *, common_fraction: Fraction = 0.8) -> Tensor:
    """Iso-CTS: the leading directions of the mean, completed by directions of each worker's own, all equally long.

    Of the r = min(M, N) directions int(common_fraction * r) are the mean delta's. The others are shared out among the
    workers, n for each: n = round(others / W), but not more than fit, r // W. What cannot be shared out stays common,
    so with more workers than directions this is Iso-C of the mean. A worker's own directions are the leading ones of
    what the common left vectors leave of its part of the mean. Weights are shares of their sum. Vectors are averaged.

    Equation: mean(sigma) polar(U) polar(V)^T, where U, sigma, V collect the r - n W leading triples U_C, sigma_C,
        V_C of sum_i w_i delta_i and the n leading ones of each (I - U_C U_C^T) w_i delta_i, sum(w) = 1
    Cost: W + 3 singular value decompositions, in float64: cutting between two close singular values needs the digits
    Bytes: every worker's delta
    Source: Sections 2.2 and 3.2; Marczak et al. (2025)
    """
    workers, rows, columns = deltas_WMN.shape
    rank = min(rows, columns)
    own = min(round((rank - int(common_fraction * rank)) / workers), rank // workers)
    shares = (weights_W.double() / weights_W.double().sum()).tolist()
    mean_MN = deltas_WMN.new_zeros(rows, columns, dtype=torch.float64)
    for share, delta_MN in zip(shares, deltas_WMN, strict=True):  # one float64 copy at a time
        mean_MN += share * delta_MN.double()
    triples = [_leading(mean_MN, rank - own * workers)]
    common_MK = triples[0][0]
    for share, delta_MN in zip(shares, deltas_WMN, strict=True) if own else ():
        part_MN = share * delta_MN.double()
        rest_MN = part_MN - common_MK @ (common_MK.mT @ part_MN)
        triples.append(_leading(rest_MN, own, noise=RANK_TOLERANCE * float(torch.linalg.matrix_norm(part_MN))))
    left_MK, sigma_K, right_NK = (torch.cat(parts, dim=-1) for parts in zip(*triples, strict=True))
    return sigma_K.sum() / rank * (_whiten(left_MK) @ _whiten(right_NK).mT)


def _check_iso_c(options: Mapping[str, Any]) -> None:
    check_polar(options["polar"], rank_tolerance=options["rank_tolerance"])


@transform(needs_matrix=True, check=_check_iso_c, degree=lambda options: 0 if options.get("scale") == "spectral" else 1)
def iso_c(
    delta_MN: Tensor,
    *,
    scale: Literal["mean", "rms", "spectral"] = "mean",
    polar: str | dict[str, str] = "auto",
    rank_tolerance: float | None = None,
    transposed: bool = False,
    batched: bool = False,
) -> Tensor:
    """Iso-C: every singular value becomes their mean, so that no direction dominates the step.

    ``scale="mean"`` takes it from <U V^T, X> = sum(sigma), at no cost after any polar method; ``"rms"`` is the paper's
    proxy |X|_F / sqrt(r); ``"spectral"`` is Muon's sqrt(fan_out / fan_in), whatever the size of X (degree 0), for
    weights stored [out, in] or, ``transposed``, [in, out]. ``polar`` and ``rank_tolerance`` are those of
    :func:`isoloco.rules.polar.polar`. The mean divides by r = min(M, N), null directions included, which stay null. 3-D
    tensors pass or, ``batched``, are matrices over the first axis.

    Equation: mean(sigma) U V^T, where X = U diag(sigma) V^T
    Cost: one polar factor: an eigendecomposition of the short side, or a few matrix products
    Bytes: none
    Source: Section 4, Algorithm 2; fast form Section 4.3; scales Appendix B; Marczak et al. (2025)
    """
    uv_MN = polar_factor(delta_MN, polar, rank_tolerance=rank_tolerance)
    rows, columns = delta_MN.shape[-2:]
    if scale == "spectral":
        return uv_MN.mul_(math.sqrt(columns / rows if transposed else rows / columns))
    if scale == "mean":
        size = mean_singular_value(delta_MN, uv_MN)
    else:
        norm = torch.linalg.vector_norm(delta_MN, dim=(-2, -1), dtype=torch.float64)
        size = (norm / math.sqrt(min(rows, columns))).to(uv_MN.dtype)
    return uv_MN.mul_(size[..., None, None])  # the factor is a new tensor: no third one of its size is needed


@transform(needs_matrix=True)
def clip_high(delta_MN: Tensor, *, batched: bool = False) -> Tensor:
    """Singular values above their mean become the mean, the others stay: only the dominant directions shrink.

    Equation: U diag(min(sigma, mean(sigma))) V^T, where X = U diag(sigma) V^T
    Cost: one singular value decomposition, in float64
    Bytes: none
    Source: Section 4.5
    """
    return _clip(delta_MN, torch.minimum)


@transform(needs_matrix=True)
def clip_low(delta_MN: Tensor, *, batched: bool = False) -> Tensor:
    """Singular values below their mean become the mean, the others stay; null directions stay null.

    Equation: U diag(max(sigma, mean(sigma))) V^T, where X = U diag(sigma) V^T
    Cost: one singular value decomposition, in float64
    Bytes: none
    Source: Section 4.5
    """
    return _clip(delta_MN, torch.maximum)


@transform()
def none(delta_S: Tensor) -> Tensor:
    """The reduced delta as it is.

    Equation: X
    Cost: none
    Bytes: none
    Source: Section 2.1, Algorithm 1
    """
    return delta_S


def _clip(x_MN: Tensor, bound: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    left_MR, sigma_R, right_NR = _decompose(x_MN)
    clipped_R = bound(sigma_R, sigma_R.mean(-1, keepdim=True))
    clipped_R *= sigma_R > RANK_TOLERANCE * sigma_R[..., :1]
    return (left_MR * clipped_R.unsqueeze(-2)) @ right_NR.mT


def _leading(x_MN: Tensor, kept: int, *, noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Leading singular triples ``[M, K], [K], [N, K]``: at most ``kept``, none of them rounding noise."""
    left_MR, sigma_R, right_NR = _decompose(x_MN)
    floor = max(noise, RANK_TOLERANCE * float(sigma_R[0]))
    kept = min(kept, int((sigma_R > floor).sum()))
    return left_MR[:, :kept], sigma_R[:kept], right_NR[:, :kept]


def _decompose(x_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, sigma, V of X = U diag(sigma) V^T in float64; lying wide, a matrix would take LAPACK twice as long."""
    wide = x_MN.shape[-2] < x_MN.shape[-1]
    tall = x_MN.double().mT if wide else x_MN.double()
    left, sigma_R, right_h = torch.linalg.svd(tall, full_matrices=False)
    return (right_h.mT, sigma_R, left) if wide else (left, sigma_R, right_h.mT)


def _whiten(vectors_MK: Tensor) -> Tensor:
    """Nearest matrix with orthonormal columns, or rows where there are more columns than rows."""
    return polar_factor(vectors_MK, "svd")
