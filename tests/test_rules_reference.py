"""Every reduce and every transform equals its naive float64 reference, on drawn shapes, dtypes, layouts and weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_rules as reference
from isoloco import rules, seeds

REDUCES = [
    ("mean", {}),
    ("ties", {"density": 0.9}),
    ("ties", {"density": 0.3}),
    ("ties", {"density": 0.5, "by": "row", "rescale": True}),
    ("ties", {"density": 0.5, "by": "column", "elect": False}),
    ("dare", {"density": 0.7}),
    ("dare", {"density": 0.7, "by": "row", "rescale": False}),
    ("dare", {"density": 0.5, "by": "column", "elect": True}),
    ("tsv", {}),
    ("tsv", {"rank_fraction": 0.5, "decorrelate": False}),
    ("tsv", {"rank_fraction": 0.8}),
    ("iso_cts", {}),
    ("iso_cts", {"common_fraction": 0.3}),
    ("iso_cts", {"common_fraction": 0.0}),
]
TRANSFORMS = [
    ("none", {}),
    ("iso_c", {}),
    ("iso_c", {"polar": "svd", "batched": True}),
    ("iso_c", {"polar": "gram", "scale": "rms"}),
    ("iso_c", {"scale": "spectral"}),
    ("iso_c", {"scale": "spectral", "transposed": True, "batched": True}),
    ("clip_high", {}),
    ("clip_high", {"batched": True}),
    ("clip_low", {}),
    ("clip_low", {"batched": True}),
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
REFERENCE_OPTIONS = ("scale", "transposed", "batched")  # of iso_c: the reference has one polar factor

EDGES = [(), (0,), (7,), (0, 4), (3, 0), (1, 1), (1, 6), (6, 1), (2, 3, 4), (3, 4, 3), (2, 0, 3), (2, 2, 3, 2)]
shapes = st.sampled_from(EDGES) | st.tuples(st.integers(1, 10), st.integers(1, 10))
workers = st.sampled_from([1, 2, 3, 4, 5, 8, 40]) | st.integers(1, 40)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
layouts = st.sampled_from(["contiguous", "transposed", "strided"])


def gaussian(shape, seed, dtype, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    return x


def drawn_masks(shape, generators, density, by):
    """The documented draw of dare: one uniform number below the density for each entry, row or column."""
    axis = {"row": 0, "column": len(shape) - 1}.get(by)
    groups = [n if axis is None or i == axis else 1 for i, n in enumerate(shape)]
    return [(torch.rand(groups, generator=generator) < density).numpy() for generator in generators]


def assert_equals(got, expected, dtype):
    """To 1e-5 in norm in float32; bfloat16 and float16 to one rounding of each entry of the output."""
    expected = torch.as_tensor(np.asarray(expected, dtype=np.float64))
    assert got.shape == expected.shape
    assert got.dtype == dtype
    norm = float(expected.norm())
    error = (got.double() - expected).abs()
    if dtype in TOLERANCE:
        assert float(error.norm()) <= TOLERANCE[dtype] * norm
    else:
        rounding = expected.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        assert bool((error <= 1.001 * rounding + 1e-5 * norm).all())


def check_reduce(rule, shape, count, dtype, layout, seed, equal_weights):
    name, options = rule
    deltas = gaussian((count, *shape), seed, dtype, layout)
    weights = np.ones(count) if equal_weights else np.random.default_rng(seed).integers(1, 9, count) / 4
    keys = [("key", seed, worker) for worker in range(count)]
    extra = {}
    if name == "dare":
        generators = [seeds.generator(*key) for key in keys]
        extra["masks"] = drawn_masks(shape, generators, options["density"], options.get("by", "element"))
    expected = getattr(reference, name)(deltas.double().numpy(), weights, **options, **extra)
    generators = [seeds.generator(*key) for key in keys]
    got = rules.bind_reduce(name, options)(deltas, weights.tolist(), generators=generators)
    assert_equals(got, expected, dtype)


def check_transform(rule, shape, dtype, layout, seed):
    name, options = rule
    delta = gaussian(shape, seed, dtype, layout)
    kept = {key: value for key, value in options.items() if key in REFERENCE_OPTIONS}
    expected = reference.transform(name, delta.double().numpy(), **kept)
    assert_equals(rules.bind_transform(name, options)(delta), expected, dtype)


reduce_cases = given(
    rule=st.sampled_from(REDUCES),
    shape=shapes,
    count=workers,
    dtype=dtypes,
    layout=layouts,
    seed=st.integers(0, 2**31),
    equal_weights=st.booleans(),
)
transform_cases = given(
    rule=st.sampled_from(TRANSFORMS), shape=shapes, dtype=dtypes, layout=layouts, seed=st.integers(0, 2**31)
)


@settings(max_examples=120, deadline=None, derandomize=True)
@reduce_cases
def test_reduces_equal_their_reference(rule, shape, count, dtype, layout, seed, equal_weights):
    check_reduce(rule, shape, count, dtype, layout, seed, equal_weights)


@settings(max_examples=120, deadline=None, derandomize=True)
@transform_cases
def test_transforms_equal_their_reference(rule, shape, dtype, layout, seed):
    check_transform(rule, shape, dtype, layout, seed)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@reduce_cases
def test_reduces_equal_their_reference_on_many_draws(rule, shape, count, dtype, layout, seed, equal_weights):
    check_reduce(rule, shape, count, dtype, layout, seed, equal_weights)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@transform_cases
def test_transforms_equal_their_reference_on_many_draws(rule, shape, dtype, layout, seed):
    check_transform(rule, shape, dtype, layout, seed)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(48, 48), (96, 31), (24, 80)])
@pytest.mark.parametrize("rule", [rule for rule in REDUCES if rule[0] in ("tsv", "iso_cts", "mean", "ties")], ids=str)
def test_larger_reduces_equal_their_reference(rule, shape):
    for count in (2, 7, 40):
        check_reduce(rule, shape, count, torch.float32, "contiguous", count, False)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(48, 48), (96, 31), (24, 80), (300, 100)])
@pytest.mark.parametrize("rule", TRANSFORMS, ids=str)
def test_larger_transforms_equal_their_reference(rule, shape):
    check_transform(rule, shape, torch.float32, "contiguous", 0)


# --- degenerate values: the reference leaves out what is not defined --------------------------------------------------


def degenerate(kind, shape):
    """``[3, *shape]`` deltas that are special in one way."""
    x = gaussian((3, *shape), 7, torch.float32, "contiguous")
    return {
        "zeros": lambda: torch.zeros_like(x),
        "one worker zero": lambda: x * torch.tensor([1.0, 0.0, 1.0])[:, None, None],
        "repeated rows": lambda: x[:, :1].expand_as(x).contiguous(),
        "repeated columns": lambda: x[..., :1].expand_as(x).contiguous(),
        "rank 1": lambda: torch.einsum("wm,wn->wmn", x[:, :, 0], x[:, 0]),
        "common rank 1": lambda: (
            torch.outer(x[0, :, 0], x[0, 0]).expand_as(x) * torch.tensor([1.0, 2.0, 0.5])[:, None, None]
        ),
        "huge": lambda: x * 1e30,
        "tiny": lambda: x * 1e-30,
    }[kind]()


KINDS = ["zeros", "one worker zero", "repeated rows", "repeated columns", "rank 1", "common rank 1", "huge", "tiny"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [rule for rule in REDUCES if rule[0] != "dare"], ids=str)
def test_reduces_of_degenerate_values(rule, kind):
    name, options = rule
    for shape in [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1)]:
        deltas = degenerate(kind, shape)
        weights = np.array([1.0, 2.0, 0.5])
        expected = getattr(reference, name)(deltas.double().numpy(), weights, **options)
        assert_equals(rules.bind_reduce(name, options)(deltas, weights.tolist()), expected, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", TRANSFORMS, ids=str)
def test_transforms_of_degenerate_values(rule, kind):
    name, options = rule
    kept = {key: value for key, value in options.items() if key in REFERENCE_OPTIONS}
    for shape in [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1)]:
        delta = degenerate(kind, shape)[0]
        expected = reference.transform(name, delta.double().numpy(), **kept)
        assert_equals(rules.bind_transform(name, options)(delta), expected, torch.float32)


@pytest.mark.parametrize("polar", ["newton_schulz", "polar_express", "newton_schulz_bf16", "polar_express_bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_iso_c_by_products_stays_near_the_exact_one(polar, kind):
    """Iterative factors leave singular values within a few percent of one, where they are not small."""
    delta = degenerate(kind, (4, 30))[0]
    got = rules.bind_transform("iso_c", {"polar": polar})(delta).double()
    assert bool(torch.isfinite(got).all())
    if kind in ("huge", "tiny"):
        expected = torch.as_tensor(reference.iso_c(delta.double().numpy()))
        assert float((got - expected).norm() / expected.norm()) < 0.08
