"""The polar factor: against float64 references, its laws, its tolerance, and the scale that it gives."""

import math

import pytest
import torch
from torch import Tensor

from isoloco.rules.polar import (
    EPS32,
    EXACT,
    ITERATIVE,
    METHODS,
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    RANK_TOLERANCE,
    auto_method,
    check,
    iterate,
    mean_singular_value,
    polar,
    polar_express_steps,
    resolve,
)
from isoloco.rules.polynomials import POLAR_EXPRESS_BF16

SHAPES = [(1, 1), (1, 9), (9, 1), (2, 2), (33, 33), (48, 64), (5, 40), (40, 5), (3, 20, 30), (2, 3, 24, 8), (1, 70, 20)]
STEPS = {"newton_schulz": NEWTON_SCHULZ, "polar_express": polar_express_steps(**POLAR_EXPRESS)}
FLOAT32_METHODS = [name for name in METHODS if not name.endswith("_bf16")]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_spectrum(sigma_R: Tensor, m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """X [m, n] in float64 with these singular values, and its U [m, R], V [n, R]."""
    r = len(sigma_R)
    u_MR = torch.linalg.qr(gaussian(m, r, seed=seed, dtype=torch.float64))[0]
    v_NR = torch.linalg.qr(gaussian(n, r, seed=seed + 1, dtype=torch.float64))[0]
    return u_MR * sigma_R.double() @ v_NR.mT, u_MR, v_NR


def spectra(r: int) -> dict[str, Tensor]:
    k_R = torch.arange(1, r + 1, dtype=torch.float64)
    return {
        "flat": torch.ones_like(k_R),
        "k^-0.5": k_R**-0.5,
        "k^-1": k_R**-1,
        "exponential": 0.05 ** (k_R / r),
        "one large": torch.where(k_R == 1, 1.0, 0.0102),
        "uniform": 1 - 0.9 * k_R / r,
    }


def compose(steps, sigma: Tensor) -> Tensor:
    for a, b, c in steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def norm2(x_MN: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x_MN.double(), 2)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_methods_equal_the_float64_reference(method, shape):
    x_MN = gaussian(*shape, seed=1)
    u_MR, sigma_R, vh_RN = torch.linalg.svd(x_MN.double(), full_matrices=False)
    bound = 30 * EPS32 * sigma_R[..., 0] / (sigma_R[..., -1] + sigma_R[..., max(-2, -sigma_R.shape[-1])])
    assert (norm2(polar(x_MN, method) - u_MR @ vh_RN) <= bound).all()


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_iterative_methods_equal_their_polynomial_of_the_singular_values(method, shape):
    x_MN = gaussian(*shape, seed=2)
    u_MR, sigma_R, vh_RN = torch.linalg.svd(x_MN.double(), full_matrices=False)
    p_R = compose(STEPS[method], sigma_R / sigma_R.norm(dim=-1, keepdim=True))
    error = norm2(polar(x_MN, method) - (u_MR * p_R.unsqueeze(-2)) @ vh_RN)
    lift = math.prod(a for a, _, _ in STEPS[method])  # how much a rounding error in a small direction can grow
    assert (error <= lift * EPS32).all()
    float64 = polar(x_MN.double(), method)
    assert (norm2(float64 - (u_MR * p_R.unsqueeze(-2)) @ vh_RN) <= 1e-11).all()


@pytest.mark.parametrize("method", ["newton_schulz_bf16", "polar_express_bf16"])
@pytest.mark.parametrize("shape", [(1, 9), (32, 64), (64, 32), (2, 20, 30)])
def test_bf16_products_give_the_polar_factor_to_a_few_percent(method, shape):
    x_MN = gaussian(*shape, seed=3)
    uv_MN = polar(x_MN, "svd")
    assert (norm2(polar(x_MN, method) - uv_MN) < 0.1).all()
    scale = mean_singular_value(x_MN, polar(x_MN, method)) / mean_singular_value(x_MN, uv_MN)
    assert (scale - 1).abs().max() < 0.035


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_equals_its_matrices_and_the_input_is_left_alone(method):
    x_BMN = gaussian(2, 3, 12, 20, seed=4).requires_grad_()
    before_BMN = x_BMN.detach().clone()
    uv_BMN = polar(x_BMN, method)
    assert not uv_BMN.requires_grad
    assert torch.equal(x_BMN, before_BMN)
    tolerance = 0.02 if method in METHODS[4:] else 3e-6
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(uv_BMN[i, j], polar(x_BMN[i, j], method), rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", FLOAT32_METHODS)
@pytest.mark.parametrize("shape", [(12, 40), (24, 30), (3, 8, 11), (16, 16)])
def test_laws_odd_transposed_strided(method, shape):
    x_MN = gaussian(*shape, seed=5)
    uv_MN = polar(x_MN, method)
    wide = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2].copy_(x_MN)
    columns = x_MN.mT.contiguous().mT
    tall_NM = polar(x_MN.mT.contiguous(), method)
    assert tall_NM.is_contiguous()
    assert uv_MN.is_contiguous()
    for other in (
        -polar(-x_MN, method),
        polar(x_MN.mT, method).mT,
        tall_NM.mT,
        polar(wide, method),
        polar(columns, method),
    ):
        torch.testing.assert_close(other, uv_MN, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 12), (6, 30)])
def test_the_scale_is_divided_out(method, shape):
    x_MN = gaussian(*shape, seed=6)
    uv_MN = polar(x_MN, method)
    tolerance = 0.05 if method.endswith("_bf16") else 1e-5
    for scale in (1e-30, 1e-6, 1e30):
        torch.testing.assert_close(polar(scale * x_MN, method), uv_MN, rtol=0, atol=tolerance)
    assert polar(1e-43 * x_MN, method).isfinite().all()
    assert polar(1e-300 * x_MN.double(), method).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_dtype_is_kept_and_half_precision_computed_in_float32(method, dtype):
    x_MN = gaussian(10, 16, seed=7).to(dtype)
    uv_MN = polar(x_MN, method)
    assert uv_MN.dtype == dtype
    if dtype != torch.float64:
        assert torch.equal(uv_MN, polar(x_MN.float(), method).to(dtype))
    elif method in ("auto", "svd"):
        u_MR, _, vh_RN = torch.linalg.svd(x_MN, full_matrices=False)
        torch.testing.assert_close(uv_MN, u_MR @ vh_RN, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_zeros_give_zeros_and_empty_ones_pass(method):
    assert torch.equal(polar(torch.zeros(4, 7), method), torch.zeros(4, 7))
    x_BMN = gaussian(3, 5, 6, seed=8)
    x_BMN[1] = 0
    uv_BMN = polar(x_BMN, method)
    assert torch.equal(uv_BMN[1], torch.zeros(5, 6))
    assert torch.equal(mean_singular_value(x_BMN, uv_BMN)[1], torch.tensor(0.0))
    torch.testing.assert_close(uv_BMN[2], polar(x_BMN[2], method), rtol=0, atol=0.02)
    for shape in ((0, 4), (4, 0), (0, 3, 4), (2, 0, 0)):
        assert polar(torch.zeros(shape), method).shape == shape
    assert mean_singular_value(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("shape", [(64, 64), (40, 90), (90, 40)])
@pytest.mark.parametrize("rank", [1, 6])
def test_directions_below_the_tolerance_contribute_nothing(method, shape, rank):
    x_MN, u_MR, v_NR = with_spectrum(torch.linspace(1, 0.2, rank), *shape)
    uv_MN = polar(x_MN.float(), method)  # rounding to float32 leaves noise in the other directions
    torch.testing.assert_close(uv_MN.double(), u_MR @ v_NR.mT, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", EXACT)
def test_a_tolerance_of_ones_own(method):
    x_MN, u_MR, v_NR = with_spectrum(torch.tensor([1.0, 0.5, 0.11, 0.09, 1e-3]), 9, 14)
    for tolerance, kept in ((0.1, 3), (0.6, 1), (RANK_TOLERANCE, 5), (0, 5)):
        uv_MN = polar(x_MN.float(), method, rank_tolerance=tolerance).double()
        uv_RR = u_MR.mT @ uv_MN @ v_NR  # what it does to the five directions
        expected = torch.diag((torch.arange(5) < kept).double())
        torch.testing.assert_close(uv_RR, expected, rtol=0, atol=1e-3)


def test_tolerance_zero_is_the_plain_formula():
    sigma_R = torch.tensor([1.0, 1e-2, 1e-7], dtype=torch.float64)
    x_MN, u_MR, v_NR = with_spectrum(sigma_R, 3, 8)
    for method, tolerance in (("svd", 1e-8), ("gram", 0.05)):  # gram: half the digits of float64
        kept = polar(x_MN, method, rank_tolerance=0)
        torch.testing.assert_close(kept, u_MR @ v_NR.mT, rtol=0, atol=tolerance)
        dropped = polar(x_MN, method)
        torch.testing.assert_close(dropped, u_MR[:, :2] @ v_NR[:, :2].mT, rtol=0, atol=1e-9)
    rank_one = torch.ones(5, 8)
    uv_MN = polar(rank_one, "svd", rank_tolerance=0)
    torch.testing.assert_close(uv_MN @ uv_MN.mT, torch.eye(5), rtol=0, atol=1e-5)
    assert polar(rank_one, "gram", rank_tolerance=0).isfinite().all()


def test_svd_tells_noise_from_directions_where_float32_lapack_does_not():
    x_MN = gaussian(512, 1, seed=9) @ gaussian(1, 512, seed=10)
    sigma_R = torch.linalg.svdvals(x_MN)
    assert sigma_R[1] > RANK_TOLERANCE * sigma_R[0], "this LAPACK would not need the second look"
    torch.testing.assert_close(polar(x_MN, "svd"), x_MN / sigma_R[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(64, 64), (48, 200)])
def test_polar_express_does_not_lift_noise(shape):
    sigma_R = torch.tensor([1.0, 0.5, RANK_TOLERANCE], dtype=torch.float64)
    x_MN = with_spectrum(sigma_R, *shape)[0]
    lifted = torch.linalg.svdvals(polar(x_MN, "polar_express"))  # the direction alone, in float64
    assert lifted[2] < 0.02
    rounded = torch.linalg.svdvals(polar(x_MN.float(), "polar_express"))  # and with what float32 adds
    assert rounded[2] < 0.02
    assert compose(STEPS["polar_express"], torch.tensor(RANK_TOLERANCE, dtype=torch.float64)) < 0.02


@pytest.mark.parametrize(
    ("steps", "lower", "bound"),
    [
        (NEWTON_SCHULZ, 0.01, 0.032),
        (polar_express_steps(**POLAR_EXPRESS), 1e-4, 5e-5),
        (polar_express_steps(**POLAR_EXPRESS_BF16), 1e-3, 3e-3),
    ],
)
def test_polynomials_take_their_interval_to_one(steps, lower, bound):
    sigma = torch.logspace(math.log10(lower), 0, 20001, dtype=torch.float64)
    sigma = torch.cat([sigma, torch.tensor([1 + 4 * EPS32], dtype=torch.float64)])  # |X|_F = sigma_1, rounded up
    assert (compose(steps, sigma) - 1).abs().max() < bound


def test_polar_express_steps_are_the_published_ones():
    """Amsel et al. 2025, Algorithm 1 (before its safety factor)."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    steps = polar_express_steps(1e-3, 1e-6)
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(published), rtol=1e-6, atol=1e-6)
    for lower in torch.logspace(-5, -0.001, 40).tolist():
        sigma = torch.linspace(lower, 1, 1001, dtype=torch.float64)
        assert (compose(polar_express_steps(lower, 1e-3), sigma) - 1).abs().max() <= 1.001e-3


@pytest.mark.parametrize("method", STEPS)
def test_the_gram_form_equals_the_plain_form(method, monkeypatch):
    x_BMN = gaussian(2, 30, 150, seed=11)
    by_gram = iterate(x_BMN, STEPS[method])
    monkeypatch.setattr("isoloco.rules.polar.GRAM_FORM_ASPECT", math.inf)
    torch.testing.assert_close(by_gram, iterate(x_BMN, STEPS[method]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spectrum", spectra(64))
@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_the_mean_singular_value_is_as_close_as_promised(spectrum, shape):
    sigma_R = spectra(64)[spectrum]
    assert sigma_R.min() / sigma_R.norm() >= 0.01
    x_MN = with_spectrum(sigma_R, *shape)[0].float()
    bounds = {"svd": 3e-6, "gram": 3e-6, "polar_express": 2e-3, "newton_schulz": 0.035}
    for method, bound in bounds.items():
        error = mean_singular_value(x_MN, polar(x_MN, method)) / sigma_R.mean() - 1
        assert error.abs() <= bound, method
    rms = x_MN.norm() / 8
    assert rms >= mean_singular_value(x_MN, polar(x_MN, "gram")) * (1 - 1e-5)
    if spectrum == "one large":
        assert rms > 4 * sigma_R.mean()


def test_the_mean_divides_by_every_direction_and_keeps_the_batch():
    x_MN = with_spectrum(torch.tensor([3.0, 1.0]), 6, 8)[0].float()
    torch.testing.assert_close(mean_singular_value(x_MN, polar(x_MN, "gram")), torch.tensor(4 / 6))
    x_BMN = gaussian(2, 3, 5, 4, dtype=torch.bfloat16)
    scale_B = mean_singular_value(x_BMN, polar(x_BMN, "svd"))
    assert scale_B.shape == (2, 3)
    assert scale_B.dtype == torch.float32
    torch.testing.assert_close(scale_B, torch.linalg.svdvals(x_BMN.float()).mean(-1), rtol=0.01, atol=0)


def test_svd_has_a_second_way(monkeypatch):
    x_MN = gaussian(12, 9, seed=12)
    expected = polar(x_MN, "svd")
    decompose = torch.linalg.svd

    def failing_in_float32(x, **options):
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return decompose(x, **options)

    monkeypatch.setattr(torch.linalg, "svd", failing_in_float32)
    uv_MN = polar(x_MN, "svd")
    assert uv_MN.dtype == torch.float32
    torch.testing.assert_close(uv_MN, expected, rtol=0, atol=1e-6)


def test_products_keep_full_precision_inside_autocast_and_reduced_modes():
    x_MN = gaussian(40, 50, seed=13)
    expected = {method: polar(x_MN, method) for method in FLOAT32_METHODS}
    with torch.autocast("cpu", torch.bfloat16):
        for method in FLOAT32_METHODS:
            assert torch.equal(polar(x_MN, method), expected[method])
    torch.set_float32_matmul_precision("medium")
    try:
        for method in FLOAT32_METHODS:
            assert torch.equal(polar(x_MN, method), expected[method])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_method_by_shape():
    assert resolve("auto", "cpu") == {"square": "gram", "wide": "gram"}
    assert resolve("auto", "cuda")["square"] in ITERATIVE
    assert auto_method((1024, 1024), "cpu") == resolve("auto", "cpu")["square"]
    assert auto_method((32000, 1024), "cuda", torch.bfloat16) == resolve("auto", "cuda")["wide"]
    assert auto_method((8, 8), "cpu", torch.float64) == "svd"
    assert resolve("svd", "cuda") == {"square": "svd", "wide": "svd"}
    by_shape = {"square": "newton_schulz", "wide": "svd"}
    assert resolve(by_shape, "cpu") == by_shape
    for shape, name in (
        ((10, 24), "newton_schulz"),
        ((24, 10), "newton_schulz"),
        ((10, 25), "svd"),
        ((3, 25, 10), "svd"),
    ):
        x_MN = gaussian(*shape)
        assert torch.equal(polar(x_MN, by_shape), polar(x_MN, name))


@pytest.mark.parametrize(
    ("method", "tolerance", "says"),
    [
        ("qr", None, "take auto, svd, gram"),
        ({"square": "svd"}, None, "square.*wide"),
        (None, None, "got None"),
        ({"square": "svd", "wide": "auto"}, None, "'auto' is not known"),
        ("svd", -1e-3, r"\[0, 1\)"),
        ("newton_schulz", 1e-3, "no rank tolerance"),
        ({"square": "gram", "wide": "polar_express"}, 1e-3, "'polar_express' has no rank tolerance"),
    ],
)
def test_mistakes_are_named(method, tolerance, says):
    with pytest.raises(ValueError, match=says):
        check(method, rank_tolerance=tolerance)
    with pytest.raises(ValueError, match=says):
        polar(torch.ones(2, 3), method, rank_tolerance=tolerance)


def test_what_is_no_matrix_is_refused():
    for x in (torch.ones(3), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="real matrices"):
            polar(x)
