"""The orthogonal polar factor U V^T of X = U diag(sigma) V^T by five ways, and the mean singular value that it gives.

`polar` replaces every singular value by one. Two ways are exact: `svd`, and `gram`, which needs only an eigenproblem on
the short side. Two need only matrix products: `newton_schulz` (five steps, rough) and `polar_express` (eight steps,
converged); each has a `_bf16` form. All work on the short side, so M <= N below, and leading dimensions are a batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps
RANK_TOLERANCE = 4 * EPS32  # relative to sigma_1; what lies below is rounding noise of a float32 matrix
WIDE_ASPECT = 2.5  # long side over short side from which a matrix counts as wide
AUTO = {
    "cpu": {"square": "gram", "wide": "gram"},
    "cuda": {"square": "polar_express", "wide": "polar_express"},
}
AUTO_FLOAT64 = {"square": "svd", "wide": "svd"}  # a float64 Gram matrix would halve the digits of a float64 input

Steps = tuple[tuple[float, float, float], ...]
# Ahn et al. 2025 (Dion), as the paper's fast path takes them: p(x) = a x + b x^3 + c x^5, one row a step
NEWTON_SCHULZ: Steps = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# polar_express converges where sigma >= lower |X|_F. What lies below rises too, by the product of the a's, so `lower`
# is no smaller than keeps noise at 4 eps32 sigma_1 below 0.02; bfloat16 has more noise, hence a larger one. `safety`:
# rounding takes the largest sigma past 1, where p is steep and each step would magnify the excess.
POLAR_EXPRESS = {"lower": 1e-4, "tolerance": 1e-3, "safety": 1.001}
POLAR_EXPRESS_BF16 = {"lower": 1e-3, "tolerance": 1e-2, "safety": 1.01}
CUSHION = 0.02407327424182761  # Amsel et al., Section 3.4: no step aims lower than this share of its upper bound
MAX_GRAM_LIFT = (
    512.0  # a direction lifted by more than this since its Gram matrix was formed drowns: 512^2 eps32 = 0.03
)
GRAM_FORM_ASPECT = 2.0  # from here iterating on the short side's Gram matrix costs fewer products than the plain form
BLOCK = 4096  # columns of a float64 copy held at a time


@torch.no_grad()
def polar(x_MN: Tensor, method: str | Mapping[str, str] = "auto", *, rank_tolerance: float | None = None) -> Tensor:
    """Orthogonal polar factor U V^T of each matrix X = U diag(sigma) V^T of a batch.

    Shapes: [..., M, N] -> [..., M, N]. Computed in float32 or better, returned in the input's dtype and layout.
    Degree 0 (the scale of X is divided out, so 1e-30 and 1e30 are safe) and odd. Zero matrices give zeros, empty ones
    pass. Input must be finite: it is not checked here. No gradient flows through.

    `method`: "svd"; "gram" (eigenvectors Q of X X^T in float64, U V^T = Q diag(lambda^-1/2) Q^T X); "newton_schulz" (5
    steps: singular values end in [0.96, 1.04] where sigma >= 0.01 |X|_F); "polar_express" (8 steps: within 3e-5 of one
    where sigma >= 1e-4 |X|_F); "newton_schulz_bf16", "polar_express_bf16" (products in bfloat16: within a few percent);
    "auto" (see `auto_method`); or {"square": method, "wide": method}, wide from an aspect of 2.5 on.

    `rank_tolerance`: directions below this times sigma_1 contribute nothing in `svd` and `gram` (default 4 eps32, what
    float32 rounding leaves of a zero; 0 keeps every direction: the plain formula, for `gram` down to sqrt(eps64)
    sigma_1). The iterative methods know no threshold: there, small directions come out between 0 and 1, and a tolerance
    other than 0 is refused.

    Source: the paper, Section 4.3; Ahn et al. 2025 (newton_schulz); Amsel et al. 2025 (polar_express).
    """
    check(method, rank_tolerance=rank_tolerance)
    if x_MN.ndim < 2 or not x_MN.is_floating_point():
        raise ValueError(f"polar takes real matrices [..., M, N]; got {x_MN.dtype} of shape {list(x_MN.shape)}")
    if x_MN.numel() == 0:
        return x_MN.clone()
    name = _choose(method, x_MN)
    work_MN = x_MN if x_MN.dtype in (torch.float32, torch.float64) else x_MN.float()
    tall = x_MN.shape[-2] > x_MN.shape[-1]
    with _full_precision(x_MN.device.type):
        if name in EXACT:
            tolerance = RANK_TOLERANCE if rank_tolerance is None else rank_tolerance
            uv_MN = EXACT[name](work_MN.mT if tall else work_MN, tolerance)
        else:
            uv_MN = ITERATIVE[name](work_MN.mT if tall else work_MN)
    return (uv_MN.mT if tall else uv_MN).to(x_MN.dtype)


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
    rows_M = torch.linalg.vecdot(x_MN.to(dtype), uv_MN.to(dtype), dim=-1)
    return (rows_M.sum(-1, dtype=torch.float64) / max(1, min(x_MN.shape[-2:]))).to(dtype)


def auto_method(shape: tuple[int, ...] | torch.Size, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The method that "auto" stands for: a fixed table over shape, device and dtype; nothing is timed at run time.

    A CPU takes `gram`, which is exact and faster than an SVD at every size; an accelerator, where eigenproblems are
    slow and products fast, `polar_express`; float64 input `svd`, anywhere.
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
    names = [method] if isinstance(method, str) else list(method.values())
    if not isinstance(method, str) and set(method) != {"square", "wide"}:
        raise ValueError(f"polar takes a method or {{'square': method, 'wide': method}}; got the keys {sorted(method)}")
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


def svd(x_MN: Tensor, tolerance: float) -> Tensor:
    """U V^T by singular value decomposition in the input's precision; [..., M, N] -> [..., M, N], M <= N."""
    try:
        # LAPACK reads a tall matrix by columns: twice as fast as the same one lying wide
        u_NM, sigma_M, vh_MM = torch.linalg.svd(x_MN.mT, full_matrices=False)
    except torch.linalg.LinAlgError:
        # Divide and conquer did not converge. CUDA has a QR iteration; on a CPU more digits are the second way.
        driver = "gesvd" if x_MN.is_cuda else None
        u_NM, sigma_M, vh_MM = torch.linalg.svd(x_MN.mT.double(), full_matrices=False, driver=driver)
    top_1 = sigma_M[..., :1]
    keep_M = (sigma_M >= tolerance * top_1) & (top_1 > 0)
    return (u_NM @ (keep_M.unsqueeze(-1) * vh_MM)).mT.to(x_MN.dtype)


def gram(x_MN: Tensor, tolerance: float) -> Tensor:
    """U V^T = (X X^T)^-1/2 X by the eigenvectors of the float64 Gram matrix; [..., M, N] -> [..., M, N], M <= N.

    Squaring halves the digits, float64 has twice those of float32: directions down to 4 eps32 sigma_1 are resolved.
    Float64 copies are made a block of columns at a time.
    """
    peak_11 = _peak(x_MN).double()
    gram_MM = x_MN.new_zeros((*x_MN.shape[:-1], x_MN.shape[-2]), dtype=torch.float64)
    for x_MB in x_MN.split(BLOCK, dim=-1):
        x64_MB = x_MB.double() / peak_11
        gram_MM += x64_MB @ x64_MB.mT
    lambda_M, q_MM = torch.linalg.eigh(gram_MM)
    top_1 = lambda_M[..., -1:]
    keep_M = (lambda_M >= max(tolerance**2, EPS64) * top_1) & (top_1 > 0)
    weight_M = torch.where(keep_M, lambda_M, torch.inf).rsqrt()
    root_MM = (q_MM * weight_M.unsqueeze(-2)) @ q_MM.mT / peak_11
    uv_MN = torch.empty_like(x_MN)
    for x_MB, uv_MB in zip(x_MN.split(BLOCK, dim=-1), uv_MN.split(BLOCK, dim=-1), strict=True):
        uv_MB.copy_(root_MM @ x_MB.double())
    return uv_MN


def iterate(x_MN: Tensor, steps: Steps, *, product_dtype: torch.dtype | None = None) -> Tensor:
    """X / |X|_F after the odd polynomials p(X) = a X + (b A + c A^2) X, A = X X^T; [..., M, N] -> [..., M, N], M <= N.

    Wide matrices are iterated on the short side: R = X X^T and the product Q of the steps so far, X Q^T at the end.
    That form squares the matrix, so it stays in float32 or better; `product_dtype` takes the plain form.
    """
    x_MN = x_MN / _peak(x_MN)
    x_MN /= torch.linalg.vector_norm(x_MN, dim=(-2, -1), keepdim=True).clamp_(min=torch.finfo(x_MN.dtype).tiny)
    if product_dtype is not None:
        return _plain_form(x_MN.to(product_dtype), steps).to(x_MN.dtype)
    if x_MN.shape[-1] < GRAM_FORM_ASPECT * x_MN.shape[-2]:
        return _plain_form(x_MN, steps)
    for phase in _phases(steps):
        x_MN = _gram_form(x_MN @ x_MN.mT, phase) @ x_MN
    return x_MN


def _plain_form(x_MN: Tensor, steps: Steps) -> Tensor:
    for a, b, c in steps:
        a_MM = x_MN @ x_MN.mT
        x_MN = a * x_MN + (b * a_MM + c * (a_MM @ a_MM)) @ x_MN
    return x_MN


def _gram_form(r_MM: Tensor, steps: Steps) -> Tensor:
    """Q with p_k(... p_1(X)) = Q X, from R = X X^T: Z = a I + b R + c R^2, then Q <- Z Q and R <- Z R Z."""
    q_MM = None
    for i, (a, b, c) in enumerate(steps):
        z_MM = b * r_MM + c * (r_MM @ r_MM)
        z_MM.diagonal(dim1=-2, dim2=-1).add_(a)
        q_MM = z_MM if q_MM is None else z_MM @ q_MM
        if i + 1 < len(steps):
            r_MM = z_MM @ r_MM @ z_MM
    assert q_MM is not None
    return q_MM


def _phases(steps: Steps) -> Iterator[Steps]:
    """Cut the steps where the lift (the product of the a's) since the last cut would pass MAX_GRAM_LIFT."""
    start, lift = 0, 1.0
    for i, (a, _, _) in enumerate(steps):
        if lift * a > MAX_GRAM_LIFT and i > start:
            yield steps[start:i]
            start, lift = i, 1.0
        lift *= a
    yield steps[start:]


@lru_cache
def polar_express_steps(lower: float, tolerance: float, safety: float = 1.0) -> Steps:
    """The fewest degree-5 odd polynomials whose composition is within `tolerance` of one on [lower, 1].

    Each is the best approximation of one on the interval [low, high] that the last has left; greedy is optimal (Amsel
    et al., Theorem 3.1). `safety` > 1 divides the input of every step, so that what rounding adds stays inside.
    """
    steps, low, high = [], lower, 1.0
    while not steps or 1 - low > tolerance:
        a, b, c = _best_quintic(max(low, CUSHION * high), high)
        centre = (_quintic(a, b, c, low) + _quintic(a, b, c, high)) / 2  # not 1 where the cushion was taken
        a, b, c = a / centre / safety, b / centre / safety**3, c / centre / safety**5
        steps.append((a, b, c))
        low = _quintic(a, b, c, low)
        high = 2 - low
    return tuple(steps)


def _quintic(a: float, b: float, c: float, x: float) -> float:
    return a * x + b * x**3 + c * x**5


def _best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Best a x + b x^3 + c x^5 to one on [low, high] by Remez exchange: its error alternates at low < q < r < high."""
    if low / high > 1 - 5e-6:  # the limit, where the exchange would divide rounding errors
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    q, r, error, last = (3 * low + high) / 4, (low + 3 * high) / 4, 0.0, math.inf
    sign_4 = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    a = b = c = 0.0
    while abs(error - last) > 1e-15:
        last = error
        x_4 = torch.tensor([low, q, r, high], dtype=torch.float64)
        rows_44 = torch.stack([x_4, x_4**3, x_4**5, sign_4], dim=-1)
        a, b, c, error = torch.linalg.solve(rows_44, torch.ones_like(x_4)).tolist()
        spread = math.sqrt(9 * b * b - 20 * a * c)
        q, r = (math.sqrt((-3 * b + sign * spread) / (10 * c)) for sign in (-1, 1))  # where the derivative is zero
    return a, b, c


def _peak(x_MN: Tensor) -> Tensor:
    """Largest magnitude of each matrix, [..., 1, 1], never zero: dividing by it keeps squares from overflowing."""
    peak_11 = torch.linalg.vector_norm(x_MN, ord=math.inf, dim=(-2, -1), keepdim=True)
    return peak_11.clamp_(min=torch.finfo(x_MN.dtype).tiny)


def _kind(shape: tuple[int, ...] | torch.Size) -> str:
    short, long = sorted(shape[-2:])
    return "wide" if long >= WIDE_ASPECT * short else "square"


def _choose(method: str | Mapping[str, str], x_MN: Tensor) -> str:
    return resolve(method, x_MN.device.type, x_MN.dtype)[_kind(x_MN.shape)]


@contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """Products in the dtype of their factors, whatever autocast or reduced float32 modes the caller trains under."""
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
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
