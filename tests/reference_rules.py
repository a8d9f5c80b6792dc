"""The rules written out in float64 NumPy from the paper's equations: slow, obvious, the measure of the fast ones.

Deltas are arrays ``[W, *S]``, weights ``[W]``. Directions whose singular value is rounding (1e-6 of the largest) have
no defined singular vectors and are left out; where there are none, these are the plain formulas.
"""

import numpy as np

NOISE = 1e-6


def svd(x):
    """U, sigma, V^T without null directions."""
    left, sigma, right = np.linalg.svd(x, full_matrices=False)
    kept = sigma > NOISE * sigma[0]
    return left[:, kept], sigma[kept], right[kept]


def polar(x):
    if x.size == 0:
        return x
    left, _, right = svd(x)
    return left @ right


def is_matrix(x):
    return x.ndim == 2 and x.size > 0


# --- reduces --------------------------------------------------------------------------------------------------------


def mean(deltas, weights):
    return sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)


def ties(deltas, weights, *, density=0.9, by="element", elect=True, rescale=False):
    trimmed = [trim(delta, density, by, rescale) for delta in deltas]
    return elected_mean(trimmed, weights) if elect else mean(trimmed, weights)


def trim(delta, density, by, rescale):
    if delta.size == 0:
        return delta
    sizes = group_norms(delta, by)
    kept = max(1, int(density * sizes.size))
    smallest = np.sort(sizes, axis=None)[sizes.size - kept]
    return np.where(sizes >= smallest, delta, 0) * (sizes.size / kept if rescale else 1)


def group_norms(delta, by):
    if by == "element" or delta.ndim < 2:
        return np.abs(delta)
    axis = 0 if by == "row" else delta.ndim - 1
    groups = np.moveaxis(delta, axis, 0)
    norms = np.array([np.sqrt((group.astype(np.longdouble) ** 2).sum()) for group in groups])
    return norms.reshape([-1 if i == axis else 1 for i in range(delta.ndim)])


def elected_mean(deltas, weights):
    shape = deltas[0].shape
    result = np.zeros(shape)
    for entry in np.ndindex(shape):
        values = [delta[entry] for delta in deltas]
        elected = np.sign(sum(w * v for w, v in zip(weights, values, strict=True)))
        agree = [(w, v) for w, v in zip(weights, values, strict=True) if np.sign(v) == elected != 0]
        result[entry] = sum(w * v for w, v in agree) / sum(w for w, _ in agree) if agree else 0.0
    return result


def dare(deltas, weights, *, masks, density=0.9, by="element", elect=False, rescale=True):
    dropped = [
        np.where(mask, delta, 0) / (density if rescale else 1) for mask, delta in zip(masks, deltas, strict=True)
    ]
    return elected_mean(dropped, weights) if elect else mean(dropped, weights)


def tsv(deltas, weights, *, rank_fraction=None, decorrelate=True):
    workers = len(deltas)
    if not is_matrix(deltas[0]):
        return mean(deltas, weights)
    if workers == 1:
        return deltas[0]
    kept = max(1, int((1 / workers if rank_fraction is None else rank_fraction) * min(deltas[0].shape)))
    relative = weights / weights.mean()
    parts = [svd(w * d) for w, d in zip(relative, deltas, strict=True)]
    left = np.concatenate([u[:, :kept] for u, _, _ in parts], axis=1)
    sigma = np.concatenate([s[:kept] for _, s, _ in parts])
    right = np.concatenate([v[:kept] for _, _, v in parts], axis=0)
    if decorrelate:
        left, right = polar(left), polar(right)
    return left @ np.diag(sigma) @ right


def iso_cts(deltas, weights, *, common_fraction=0.8):
    if not is_matrix(deltas[0]):
        return mean(deltas, weights)
    workers, rank = len(deltas), min(deltas[0].shape)
    own = min(round((rank - int(rank * common_fraction)) / workers), rank // workers)
    common = rank - workers * own
    shares = [w * d for w, d in zip(weights / weights.sum(), deltas, strict=True)]
    left, sigma, right = (part[:common] for part in transposed_svd(sum(shares)))
    parts = [(left, sigma, right)]
    for share in shares if own else []:
        residual = share - left.T @ (left @ share)
        u, s, v = transposed_svd(residual)
        real = s[:own] > NOISE * np.linalg.norm(share)
        parts.append((u[:own][real], s[:own][real], v[:own][real]))
    left, sigma, right = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return sigma.sum() / rank * polar(left.T) @ polar(right)


def transposed_svd(x):
    """Singular triples as rows."""
    left, sigma, right = svd(x)
    return left.T, sigma, right


# --- transforms -----------------------------------------------------------------------------------------------------


def iso_c(x, *, scale="mean", transposed=False):
    left, sigma, right = svd(x)
    rank = min(x.shape)
    fan_out, fan_in = x.shape[::-1] if transposed else x.shape
    size = {
        "mean": sigma.sum() / rank,
        "rms": np.sqrt((sigma**2).sum() / rank),
        "spectral": np.sqrt(fan_out / fan_in),
    }[scale]
    return size * left @ right


def clip_high(x):
    left, sigma, right = svd(x)
    mean_sigma = sigma.sum() / min(x.shape)
    return left @ np.diag(np.where(sigma > mean_sigma, mean_sigma, sigma)) @ right


def clip_low(x):
    left, sigma, right = svd(x)
    mean_sigma = sigma.sum() / min(x.shape)
    return left @ np.diag(np.where(sigma < mean_sigma, mean_sigma, sigma)) @ right


def none(x):
    return x


def transform(name, x, **options):
    """A transform on any shape: what is no matrix passes; ``batched`` takes 3-D tensors matrix by matrix."""
    options = dict(options)
    batched = options.pop("batched", False)
    if batched and x.ndim == 3 and x.size:
        return np.stack([transform(name, matrix, **options) for matrix in x])
    return globals()[name](x, **options) if is_matrix(x) else x
