"""Codes on the wire: what is lost in one round arrives in a later one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isoloco.codec import BLOCK, WIRE_BYTES, decode, encode, round_trip

LOSSY = ["bfloat16", "int8"]
SHAPES = [(), (1,), (7,), (BLOCK,), (3, BLOCK), (5, 77), (2, 3, 4)]


def deltas(shape: tuple[int, ...], rounds: int, seed: int = 0) -> list[Tensor]:
    """Entries of very different sizes."""
    keyed = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=keyed) * 10.0 ** torch.randint(-4, 2, shape, generator=keyed)
        for _ in range(rounds)
    ]


def quantum(x: Tensor, wire: str) -> Tensor:
    """What a code may be off by, for each entry: half a step of the grid that it rounds to."""
    if wire == "bfloat16":
        return x.abs() * 2.0**-8
    blocks = torch.nn.functional.pad(x.flatten().abs(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.amax(1, keepdim=True).expand(-1, BLOCK).flatten()[: x.numel()]
    return (largest / 254).view(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", LOSSY)
def test_one_trip_is_off_by_half_a_step_of_its_grid(wire, shape):
    (delta,) = deltas(shape, 1)
    arrived, error = round_trip(delta, None, wire)
    assert (arrived.shape, arrived.dtype) == (delta.shape, delta.dtype)
    assert error is not None
    assert torch.equal(arrived + error, delta) or torch.allclose(arrived + error, delta, rtol=1e-7, atol=0)
    assert (error.abs() <= quantum(delta, wire) * 1.0001 + 1e-38).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", LOSSY)
def test_errors_do_not_pile_up(wire, shape):
    """After any number of rounds, what arrived in all is what was sent in all, but for the last round's error."""
    sent, arrived_sum, error = torch.zeros(shape).double(), torch.zeros(shape).double(), None
    for delta in deltas(shape, 50):
        wanted = delta if error is None else delta + error
        arrived, error = round_trip(delta, error, wire)
        sent, arrived_sum = sent + delta, arrived_sum + arrived
        assert error is not None
        assert ((sent - arrived_sum).abs() <= quantum(wanted, wire) + 1e-5 * (1 + sent.abs())).all()
        assert torch.allclose(sent - arrived_sum, error.double(), atol=1e-4)


@pytest.mark.parametrize("wire", LOSSY)
def test_a_small_entry_beside_a_large_one_arrives_in_time(wire):
    """Without the error it would be rounded away in every round."""
    delta = torch.full((BLOCK,), 1e-3)
    delta[0] = 1.0
    plain = sum(round_trip(delta, None, wire)[0][1:].double() for _ in range(64)) / 64
    total, error = torch.zeros(BLOCK).double(), None
    for _ in range(64):
        arrived, error = round_trip(delta, error, wire)
        total += arrived
    assert ((total / 64)[1:] - 1e-3).abs().max() < 1e-3 / 8
    if wire == "int8":
        assert (plain == 0).all()


@pytest.mark.parametrize("wire", LOSSY)
def test_zero_stays_zero_and_nothing_stays_nothing(wire):
    for shape in [(BLOCK + 3,), (0,), (0, 4)]:
        arrived, error = round_trip(torch.zeros(shape), None, wire)
        assert error is not None
        assert torch.equal(arrived, torch.zeros(shape))
        assert torch.equal(error, torch.zeros(shape))
    mixed = torch.cat([torch.zeros(BLOCK), torch.ones(BLOCK)])  # a block of zeros has no scale
    assert torch.equal(round_trip(mixed, None, wire)[0], mixed)


def test_float32_is_itself_without_an_error():
    (delta,) = deltas((5, 7), 1)
    arrived, error = round_trip(delta, None, "float32")
    assert arrived is delta
    assert error is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", ["float32", *LOSSY])
def test_what_is_sent_has_the_bytes_that_are_planned(wire, shape):
    (delta,) = deltas(shape, 1)
    sent = encode(delta, wire)
    count = sum(part.numel() * part.element_size() for part in sent)
    blocks = -(-delta.numel() // BLOCK) if wire == "int8" else 0
    assert count == delta.numel() * (WIRE_BYTES[wire] if wire != "int8" else 1) + 4 * blocks
    assert torch.equal(decode(sent, shape, wire), round_trip(delta, None, wire)[0])


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=40), st.sampled_from(LOSSY))
@settings(max_examples=60, deadline=None)
def test_codes_are_odd_and_finite(values, wire):
    x = torch.tensor(values, dtype=torch.float32)
    there, error = round_trip(x, None, wire)
    back, _ = round_trip(-x, None, wire)
    assert torch.equal(there, -back)
    assert there.isfinite().all()
    assert error is not None
    assert error.isfinite().all()
