"""The orthogonal polar factor U V^T of X = U diag(sigma) V^T by five ways, and the mean singular value that it gives.

`polar` replaces every singular value by one. Two ways are exact: `svd`, and `gram`, which needs only an eigenproblem on
the short side. Two need only matrix products: `newton_schulz` (five steps, rough) and `polar_express` (eight steps,
converged); each has a `_bf16` form. All work on the short side, so M <= N below, and leading dimensions are a batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from .polynomials import NEWTON_SCHULZ, POLAR_EXPRESS, POLAR_EXPRESS_BF16, Steps, polar_express_steps

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps
RANK_TOLERANCE = 4 * EPS32  # relative to sigma_1; what lies below is rounding noise of a float32 matrix
DOUBT = 64 * EPS32  # under this share of sigma_1 a float32 decomposition may take noise for a direction
WIDE_ASPECT = 2.5  # long side over short side from which a matrix counts as wide
AUTO = {
    "cpu": {"square": "gram", "wide": "gram"},
    "cuda": {"square": "polar_express", "wide": "polar_express"},
}
AUTO_FLOAT64 = {"square": "svd", "wide": "svd"}  # a float64 Gram matrix would halve the digits of a float64 input
MAX_GRAM_LIFT = 512.0  # a direction lifted by more since its Gram matrix was formed would drown: 512^2 eps32 = 0.03
GRAM_FORM_ASPECT = 2.0  # from here iterating on the short side's Gram matrix costs fewer products than the plain form
BLOCK = 1024  # columns of a float64 copy held at a time


@torch.no_grad()
def polar(x_MN: Tensor, method: str | Mapping[str, str] = "auto", *, rank_tolerance: float | None = None) -> Tensor:
    """Orthogonal polar factor U V^T of each matrix X = U diag(sigma) V^T of a batch.

    Shapes: [..., M, N] -> [..., M, N]. Computed in float32 or better, returned in the input's dtype and layout.
    Degree 0 (the scale of X is divided out, so 1e-30 and 1e30 are safe) and odd. Zero matrices give zeros, empty ones
    pass. Input must be finite: it is not checked here. No gradient flows through.

    `method`: "svd"; "gram" (eigenvectors Q of X X^T in float64, U V^T = Q diag(lambda^-1/2) Q^T X); "newton_schulz" (5
    steps: singular values end in [0.97, 1.04] where sigma >= 0.01 |X|_F); "polar_express" (8 steps: within 5e-5 of one
    where sigma >= 1e-4 |X|_F); "newton_schulz_bf16", "polar_express_bf16" (products in bfloat16: within a few percent,
    but the rounding noise of a low-rank matrix is lifted, too); "auto" (see `auto_method`); or {"square": method,
    "wide": method}, wide from an aspect of 2.5 on.

    `rank_tolerance`: directions below this times sigma_1 contribute nothing in `svd` and `gram` (default 4 eps32, what
    float32 rounding leaves of a zero; 0 keeps every direction: the plain formula, for `gram` down to sqrt(eps64)
    sigma_1). The iterative methods know no threshold: there, small directions come out between 0 and 1, and a tolerance
    other than 0 is refused.

    Source: the paper, Section 4.3; Ahn et al. 2025 (newton_schulz); Amsel et al. 2025 (polar_express).
    """
    methods = resolve(method, x_MN.device.type, x_MN.dtype)
    check(methods, rank_tolerance=rank_tolerance)
    if x_MN.ndim < 2 or not x_MN.is_floating_point():
        raise ValueError(f"polar takes real matrices [..., M, N]; got {x_MN.dtype} of shape {list(x_MN.shape)}")
    if x_MN.numel() == 0:
        return x_MN.clone()
    x_BMN = x_MN.reshape(-1, *x_MN.shape[-2:]).to(torch.promote_types(x_MN.dtype, torch.float32))
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x_BMN = x_BMN.mT if tall else x_BMN
    name = methods[_kind(x_MN.shape)]
    tolerance = RANK_TOLERANCE if rank_tolerance is None else rank_tolerance
    with _full_precision(x_MN.device.type):
        uv_BMN = EXACT[name](x_BMN, tolerance) if name in EXACT else ITERATIVE[name](x_BMN)
    return (uv_BMN.mT if tall else uv_BMN).reshape(x_MN.shape).to(x_MN.dtype)


def mean_singular_value(x_MN: Tensor, uv_MN: Tensor) -> Tensor:
    """Mean singular value of X from its polar factor: <U V^T, X> / r, r = min(M, N).

    With X = U diag(sigma) V^T, <U V^T, X> = tr(V U^T U diag(sigma) V^T) = tr(diag(sigma)) = sum(sigma): the nuclear
    norm costs one pass over two matrices that are there already. An iterative method returns P = U diag(p(sigma)) V^T
    with p near one, and then <P, X> / r = mean(sigma p(sigma)), whose relative error is a mean of p - 1 weighted by
    sigma: small directions, where p is far from one, hardly count. Where sigma_r >= 0.01 |X|_F it is at most 3.5 %
    with `newton_schulz` and 0.2 % with `polar_express`. The paper takes |X|_F / sqrt(r), the root mean square, which is
    up to 4.3 times the mean on decaying spectra. r counts every direction, also those under a rank tolerance.

    Shapes: two of [..., M, N] -> [...]. Float32, or float64 where an input is. Zero if the matrix is empty.
    Source: this project; the paper's proxy: Section 4.3.
    """
    dtype = torch.float64 if torch.float64 in (x_MN.dtype, uv_MN.dtype) else torch.float32
    if x_MN.stride(-1) > x_MN.stride(-2):  # lying by columns: read it in its order
        x_MN, uv_MN = x_MN.mT, uv_MN.mT
    rows_M = torch.einsum("...mn,...mn->...m", x_MN.to(dtype), uv_MN.to(dtype))  # without a product in memory
    return rows_M.sum(-1) / max(1, min(x_MN.shape[-2:]))


def auto_method(shape: tuple[int, ...] | torch.Size, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The method that "auto" stands for: a fixed table over shape, device and dtype; nothing is timed at run time.

    A CPU takes `gram`, exact and no slower than an SVD; an accelerator, where eigenproblems are slow and products fast,
    `polar_express`; float64 input `svd`, anywhere.
    """
    return resolve("auto", device_type, dtype)[_kind(shape)]


def resolve(method: str | Mapping[str, str], device_type: str, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The choice written out as {"square": method, "wide": method}, for a config that says what was run."""
    check(method)
    if not isinstance(method, str):
        return dict(method)
    if method != "auto":
        return {"square": method, "wide": method}
    return dict(AUTO_FLOAT64 if dtype == torch.float64 else AUTO.get(device_type, AUTO["cuda"]))


def check(method: str | Mapping[str, str], *, rank_tolerance: float | None = None) -> None:
    """Raise ValueError unless `polar` takes this method and this tolerance, so that a config fails at start."""
    if not isinstance(method, str) and (not isinstance(method, Mapping) or set(method) != {"square", "wide"}):
        raise ValueError(f"polar takes a method's name or {{'square': name, 'wide': name}}; got {method!r}")
    names = [method] if isinstance(method, str) else list(method.values())
    for name in names:
        if name not in METHODS and not (name == "auto" and isinstance(method, str)):
            raise ValueError(f"polar {name!r} is not known; take auto, {', '.join(METHODS)}")
    if rank_tolerance is None:
        return
    if not 0 <= rank_tolerance < 1:
        raise ValueError(f"rank_tolerance is a share of sigma_1 in [0, 1); got {rank_tolerance}")
    soft = [name for name in names if name in ITERATIVE]
    if rank_tolerance > 0 and soft:
        raise ValueError(f"polar {soft[0]!r} has no rank tolerance; leave it out, or take polar svd or gram")


def svd(x_BMN: Tensor, tolerance: float) -> Tensor:
    """U V^T by singular value decomposition in the input's precision; [B, M, N] -> [B, M, N], M <= N.

    In float32 a zero comes back as up to 8 eps32 sigma_1, above the default tolerance. So a matrix whose smallest
    singular value lies under DOUBT times the largest is decomposed in float64, unless every direction is kept anyway.
    """
    u_BMM, sigma_BM, vh_BMN = _svd(x_BMN)
    doubt_B = sigma_BM[:, -1] < DOUBT * sigma_BM[:, 0]
    if tolerance > 0 and x_BMN.dtype == torch.float32 and doubt_B.any():
        u_BMM[doubt_B], sigma_BM[doubt_B], vh_BMN[doubt_B] = (part.float() for part in _svd(x_BMN[doubt_B].double()))
    top_B1 = sigma_BM[:, :1]
    keep_BM = (sigma_BM >= tolerance * top_B1) & (top_B1 > 0)
    return _apply(u_BMM * keep_BM.unsqueeze(-2), vh_BMN, like=x_BMN)


def _svd(x_BMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, sigma, V^T, with a second way where divide and conquer fails to converge: QR iteration on CUDA, or float64."""
    x_BNM = x_BMN.mT  # LAPACK reads a tall matrix by columns: twice as fast as the same one lying wide
    try:
        v_BNM, sigma_BM, uh_BMM = torch.linalg.svd(x_BNM, full_matrices=False)
    except torch.linalg.LinAlgError:
        driver = "gesvd" if x_BMN.is_cuda else None
        again = torch.linalg.svd(x_BNM.double(), full_matrices=False, driver=driver)
        v_BNM, sigma_BM, uh_BMM = (part.to(x_BMN.dtype) for part in again)
    return uh_BMM.mT, sigma_BM, v_BNM.mT


def gram(x_BMN: Tensor, tolerance: float) -> Tensor:
    """U V^T = (X X^T)^-1/2 X by the eigenvectors of the float64 Gram matrix; [B, M, N] -> [B, M, N], M <= N.

    Squaring halves the digits, float64 has twice those of float32: directions down to 4 eps32 sigma_1 are resolved.
    Float64 copies of a wide matrix are made a block of columns at a time.
    """
    if x_BMN.dtype == torch.float64:  # squares of float32 numbers fit into float64, squares of these need not
        x_BMN = x_BMN / _peak(x_BMN)
    wide = x_BMN.shape[-1] >= GRAM_FORM_ASPECT * x_BMN.shape[-2]
    work_BMN = x_BMN if wide else x_BMN.double()
    lambda_BM, q_BMM = torch.linalg.eigh(_lower_gram(work_BMN).mT, UPLO="U")  # LAPACK is quicker with "U"
    top_B1 = lambda_BM[:, -1:]
    keep_BM = (lambda_BM >= max(tolerance**2, EPS64) * top_B1) & (top_B1 > 0)
    weight_BM = torch.where(keep_BM, lambda_BM, torch.inf).rsqrt()
    if not wide:
        # Two products are cheaper than forming the root, and the second, of orthonormal factors, loses no digits.
        vh_BMN = _apply(q_BMM.mT, work_BMN, like=x_BMN).mul_(weight_BM.unsqueeze(-1)).to(x_BMN.dtype)
        return _apply(q_BMM.to(x_BMN.dtype), vh_BMN, like=x_BMN)
    root_BMM = (q_BMM * weight_BM.unsqueeze(-2)) @ q_BMM.mT
    uv_BMN = torch.empty_like(x_BMN)
    for x_BMC, uv_BMC in zip(x_BMN.split(BLOCK, dim=-1), uv_BMN.split(BLOCK, dim=-1), strict=True):
        uv_BMC.copy_(_apply(root_BMM, x_BMC.double(), like=x_BMN))
    return uv_BMN


def _lower_gram(x_BMN: Tensor) -> Tensor:
    """X X^T in float64, [B, M, M]; above the diagonal blocks, where nobody looks, zeros."""
    rows = x_BMN.shape[-2]
    strip = max(64, -(-rows // 8))  # eight strips of rows spare 7/16 of the products
    gram_BMM = x_BMN.new_zeros((len(x_BMN), rows, rows), dtype=torch.float64)
    for x_BMC in x_BMN.split(BLOCK, dim=-1):
        x64_BMC = x_BMC.double()
        for i in range(0, rows, strip):
            gram_BMM[:, i : i + strip, : i + strip].baddbmm_(x64_BMC[:, i : i + strip], x64_BMC[:, : i + strip].mT)
    return gram_BMM


def iterate(x_BMN: Tensor, steps: Steps, *, product_dtype: torch.dtype | None = None) -> Tensor:
    """X / |X|_F after the odd polynomials p(X) = a X + (b A + c A^2) X, A = X X^T; [B, M, N] -> [B, M, N], M <= N.

    Wide matrices are iterated on the short side: R = X X^T and the product Q of the steps so far, Q X at the end.
    That form squares the matrix, so it stays in float32 or better; `product_dtype` takes the plain form.
    """
    x_BMN = x_BMN / _peak(x_BMN)
    x_BMN /= torch.linalg.vector_norm(x_BMN, dim=(-2, -1), keepdim=True).clamp_(min=torch.finfo(x_BMN.dtype).tiny)
    if product_dtype is not None:
        return _plain_form(x_BMN.to(product_dtype), steps).to(x_BMN.dtype)
    if x_BMN.shape[-1] < GRAM_FORM_ASPECT * x_BMN.shape[-2]:
        return _plain_form(x_BMN, steps)
    for phase in _phases(steps):
        x_BMN = _apply(_gram_form(x_BMN @ x_BMN.mT, phase), x_BMN, like=x_BMN)
    return x_BMN


def _plain_form(x_BMN: Tensor, steps: Steps) -> Tensor:
    transposed = x_BMN.stride(-1) > x_BMN.stride(-2)
    for a, b, c in steps:
        a_BMM = x_BMN @ x_BMN.mT
        z_BMM = torch.baddbmm(a_BMM, a_BMM, a_BMM, beta=b, alpha=c)
        if transposed:  # by rows of what lies in memory; Z is symmetric
            x_BMN = torch.baddbmm(x_BMN.mT, x_BMN.mT, z_BMM, beta=a).mT
        else:
            x_BMN = torch.baddbmm(x_BMN, z_BMM, x_BMN, beta=a)
    return x_BMN


def _gram_form(r_BMM: Tensor, steps: Steps) -> Tensor:
    """Q with p_k(... p_1(X)) = Q X, from R = X X^T: Z = a I + b R + c R^2, then Q <- Z Q and R <- Z R Z."""
    q_BMM = torch.eye(r_BMM.shape[-1], dtype=r_BMM.dtype, device=r_BMM.device).expand_as(r_BMM)
    for i, (a, b, c) in enumerate(steps):
        z_BMM = torch.baddbmm(r_BMM, r_BMM, r_BMM, beta=b, alpha=c)
        z_BMM.diagonal(dim1=-2, dim2=-1).add_(a)
        q_BMM = z_BMM @ q_BMM if i else z_BMM
        if i + 1 < len(steps):
            r_BMM = z_BMM @ r_BMM @ z_BMM
    return q_BMM


def _apply(z_BMM: Tensor, x_BMN: Tensor, *, like: Tensor) -> Tensor:
    """Z X, laid out in memory as `like` is: by rows, or by columns where a tall matrix came in transposed."""
    return (x_BMN.mT @ z_BMM.mT).mT if like.stride(-1) > like.stride(-2) else z_BMM @ x_BMN


def _phases(steps: Steps) -> Iterator[Steps]:
    """Cut the steps where the lift (the product of the a's) since the last cut would pass MAX_GRAM_LIFT."""
    start, lift = 0, 1.0
    for i, (a, _, _) in enumerate(steps):
        if lift * a > MAX_GRAM_LIFT and i > start:
            yield steps[start:i]
            start, lift = i, 1.0
        lift *= a
    yield steps[start:]


def _peak(x_BMN: Tensor) -> Tensor:
    """Largest magnitude of each matrix, [B, 1, 1], never zero: dividing by it keeps squares from overflowing."""
    # four times as fast as the infinity norm, and no copy as abs() makes
    peak_B11 = torch.maximum(x_BMN.amax((-2, -1), keepdim=True), -x_BMN.amin((-2, -1), keepdim=True))
    return peak_B11.clamp_(min=torch.finfo(x_BMN.dtype).tiny)


def _kind(shape: tuple[int, ...] | torch.Size) -> str:
    short, long = sorted(shape[-2:])
    return "wide" if long >= WIDE_ASPECT * short else "square"


@contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """Products in the dtype of their factors, whatever autocast or reduced float32 modes the caller trains under."""
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [(backend, backend.fp32_precision) for backend in backends]
    reduced = [(backend, value) for backend, value in before if value not in ("none", "ieee")]
    for backend, _ in reduced:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, value in reduced:
            backend.fp32_precision = value


def _express(x_MN: Tensor) -> Tensor:
    return iterate(x_MN, polar_express_steps(**POLAR_EXPRESS))


def _express_bf16(x_MN: Tensor) -> Tensor:
    return iterate(x_MN, polar_express_steps(**POLAR_EXPRESS_BF16), product_dtype=torch.bfloat16)


EXACT: dict[str, Callable[[Tensor, float], Tensor]] = {"svd": svd, "gram": gram}
ITERATIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "newton_schulz": partial(iterate, steps=NEWTON_SCHULZ),
    "polar_express": _express,
    "newton_schulz_bf16": partial(iterate, steps=NEWTON_SCHULZ, product_dtype=torch.bfloat16),
    "polar_express_bf16": _express_bf16,
}
METHODS = (*EXACT, *ITERATIVE)
