"""Polar factors against torch's SVD: CPU time of one thread, error of U V^T, error of the mean singular value.

    python -m benchmarks.polar [--toy] [--out DIR]

Each matrix is X = Q W diag(sigma) W^T with Q of orthonormal columns and W orthogonal, made in float64, so its polar
factor is Q; the Gaussian one has its factor from a QR and an SVD of R in float64. `uv_error` is the largest
|(P - U V^T) v| over right singular vectors v with sigma above 1e-5 sigma_1. Times are ratios to torch.linalg.svd and
the product U V^T on the same matrix in the same run, in turn; medians over the repeats. Rounding X to float32 alone
moves a direction by up to about eps32 sigma_1 / sigma: that much of `uv_error` is not the method's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Bar, cpu_seconds, has_bf16, report
from isoloco.rules.polar import METHODS, WIDE_ASPECT, mean_singular_value, polar

SHAPES = [(512, 512), (1024, 1024), (2688, 1024), (32000, 1024)]
TOY_SHAPES = [(24, 24), (64, 24), (200, 24)]
BF16 = [name for name in METHODS if name.endswith("_bf16")]
CONVERGED = ("svd", "gram", "polar_express")


def spectra(r: int) -> dict[str, Tensor]:
    k_R = torch.arange(1, r + 1, dtype=torch.float64)
    return {
        "flat": torch.ones_like(k_R),
        "k^-0.5": k_R**-0.5,
        "k^-1": k_R**-1,
        "exponential": 10 ** (-6 * (k_R - 1) / (r - 1)),
    }


def matrices(n: int, r: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Spectrum's name, X [n, r] in float32, its U V^T, sigma and V in float64."""
    generator = torch.Generator().manual_seed(n + r)
    gaussian_NR = torch.randn(n, r, generator=generator)
    q_NR, r_RR = torch.linalg.qr(gaussian_NR.double())
    w_RR = torch.linalg.qr(torch.randn(r, r, generator=generator, dtype=torch.float64))[0]
    for name, sigma_R in spectra(r).items():
        yield name, (q_NR @ ((w_RR * sigma_R) @ w_RR.mT)).float(), q_NR, sigma_R, w_RR
    u_RR, sigma_R, vh_RR = torch.linalg.svd(r_RR)
    yield "Gaussian", gaussian_NR, q_NR @ (u_RR @ vh_RR), sigma_R, vh_RR.mT


def naive(x_MN: Tensor) -> Tensor:
    u_MR, _, vh_RN = torch.linalg.svd(x_MN, full_matrices=False)
    return u_MR @ vh_RN


def measure(shape: tuple[int, int], repeats: int) -> Iterator[dict[str, Any]]:
    n, r = shape
    # Where an SVD takes seconds it runs once: our svd makes the same LAPACK call, and its time says no more. Where it
    # takes milliseconds the median is of more runs.
    once = n * r > 2**24
    repeats = 3 * repeats if n * r < 2**19 else repeats
    methods = [name for name in METHODS if (name not in BF16 or has_bf16()) and not (once and name == "svd")]
    for spectrum, x_MN, uv_MN, sigma_R, v_RR in matrices(n, r):
        work: dict[str, Callable[[], Tensor]] = {"torch SVD": lambda x=x_MN: naive(x)}
        work |= {name: lambda x=x_MN, name=name: polar(x, name) for name in methods}
        times: dict[str, list[float]] = {name: [] for name in work}
        results: dict[str, Tensor] = {}
        for repeat in range(repeats):
            for name, call in work.items():
                if name == "torch SVD" and once and repeat:
                    continue
                seconds, results[name] = cpu_seconds(call)
                times[name].append(seconds)
        median = {name: statistics.median(values) for name, values in times.items()}
        seen_RK = v_RR[:, sigma_R > 1e-5 * sigma_R[0]]
        for name, p_MN in results.items():
            error_K = torch.linalg.vector_norm((p_MN - uv_MN) @ seen_RK, dim=0)
            yield {
                "shape": f"{n}x{r}",
                "spectrum": spectrum,
                "method": name,
                "cpu_s": median[name],
                "vs_svd": median[name] / median["torch SVD"],
                "uv_error": error_K.max().item(),
                "scale_error": (mean_singular_value(x_MN, p_MN) / sigma_R.mean() - 1).item(),
                "rms_error": (sigma_R.square().mean().sqrt() / sigma_R.mean() - 1).item(),
                "sigma_min_over_norm": (sigma_R[-1] / sigma_R.norm()).item(),
            }


def bars(rows: list[dict[str, Any]], *, timed: bool) -> list[Bar]:
    def worst(key: str, keep: Callable[[dict[str, Any]], bool]) -> float | None:
        return max((abs(row[key]) for row in rows if keep(row)), default=None)

    def bar(what: str, value: float | None, limit: float, unit: str) -> Bar:
        if value is None:
            return Bar(what=what, measured="no such case here", passed=None)
        return Bar(what=what, measured=f"{value:.3g}{unit}", passed=value <= limit)

    def well_conditioned(row: dict[str, Any]) -> bool:
        return row["sigma_min_over_norm"] >= 0.01

    def aspect(row: dict[str, Any]) -> float:
        n, r = map(int, row["shape"].split("x"))
        return n / r

    converged = worst("scale_error", lambda row: row["method"] in CONVERGED and well_conditioned(row))
    rough = worst("scale_error", lambda row: row["method"] == "newton_schulz" and well_conditioned(row))
    square = worst("vs_svd", lambda row: timed and row["method"] == "gram" and aspect(row) == 1)
    wide = worst("vs_svd", lambda row: timed and row["method"] == "gram" and aspect(row) >= WIDE_ASPECT)
    half = worst("vs_svd", lambda row: timed and row["method"] in BF16 and row["shape"] == "1024x1024")
    return [
        bar("scale within 0.2 %, converged methods", converged, 0.002, ""),
        bar("scale within 3.5 %, newton_schulz", rough, 0.035, ""),
        bar("gram at most 1.1 times SVD's time on squares", square, 1.1, " times"),
        bar(f"gram faster than SVD from aspect {WIDE_ASPECT}", wide, 1.0, " times"),
        bar("bf16 at most half of SVD's time at 1024x1024, where the CPU has bf16", half, 0.5, " times"),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.polar", description="Polar factors against torch's SVD."
    )
    parser.add_argument("--toy", action="store_true", help="tiny matrices: shows that it runs, its times mean nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help=f"directory for polar.json and polar.csv (default: {RESULTS.name})")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [row for shape in (TOY_SHAPES if options.toy else SHAPES) for row in measure(shape, options.repeats)]
    return report(
        "polar", rows, bars(rows, timed=not options.toy), out=options.out or (None if options.toy else RESULTS)
    )


if __name__ == "__main__":
    raise SystemExit(main())
