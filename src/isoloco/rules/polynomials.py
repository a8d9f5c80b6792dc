"""Odd quintics p(x) = a x + b x^3 + c x^5, applied one after another, that take singular values in (0, 1] to one.

Applied to a matrix, p(X) = a X + (b A + c A^2) X with A = X X^T acts on the singular values alone: the polar factor
needs products and nothing else.
"""

import math
from functools import lru_cache

import torch

Steps = tuple[tuple[float, float, float], ...]  # (a, b, c), one row a step

# Ahn et al. 2025 (Dion), as the fast path of the paper takes them
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
