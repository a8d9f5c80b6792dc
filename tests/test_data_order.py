"""The order of rows: a bijection in every epoch, well mixed, without memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.data.order import Order


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 10**6))
def test_every_row_comes_once_in_an_epoch(rows, seed, epoch):
    taken = Order(rows, seed).take(epoch * rows, (epoch + 1) * rows)
    assert taken.dtype == np.int64
    assert np.array_equal(np.sort(taken), np.arange(rows))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 2**62), position=st.integers(0, 2**64), count=st.integers(1, 50))
def test_rows_lie_inside_and_differ_within_an_epoch(rows, position, count):
    taken = Order(rows, 7).take(position, position + count)
    assert taken.min() >= 0
    assert taken.max() < rows
    for epoch in range(position // rows, (position + count - 1) // rows + 1):
        inside = taken[max(epoch * rows - position, 0) : (epoch + 1) * rows - position]
        assert len(set(inside.tolist())) == len(inside)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 500), start=st.integers(0, 2000), count=st.integers(0, 300), cut=st.integers(0, 300))
def test_a_range_is_its_parts_and_its_single_rows(rows, start, count, cut):
    order = Order(rows, 3)
    middle, stop = start + min(cut, count), start + count
    whole = order.take(start, stop)
    assert np.array_equal(whole, np.concatenate([order.take(start, middle), order.take(middle, stop)]))
    assert [order.row(position) for position in range(start, min(stop, start + 5))] == whole[:5].tolist()


def test_seeds_and_epochs_have_orders_of_their_own():
    rows = 1000
    first = Order(rows, 1).take(0, 3 * rows).reshape(3, rows)
    other = Order(rows, 2).take(0, rows)
    pairs = [(first[0], first[1]), (first[1], first[2]), (first[0], first[2]), (first[0], other)]
    assert all((a == b).sum() < 10 for a, b in pairs)  # one is expected of two random orders
    assert np.array_equal(first[0], Order(rows, 1).take(0, rows))


@pytest.mark.parametrize("rows", [4096, 10_007, 65_536])
def test_rows_are_well_mixed(rows):
    bins = 16
    cells_of_one = rows / bins**2
    for seed in range(5):
        order = Order(rows, seed).take(0, rows)
        place = np.arange(rows)
        # where a row lies tells nothing of which row it is: chi-square over 16 x 16 cells, 225 degrees of freedom
        cells = np.bincount(place * bins // rows * bins + order * bins // rows, minlength=bins**2)
        assert 120 < ((cells - cells_of_one) ** 2 / cells_of_one).sum() < 360
        # neighbours are not neighbours: neither sorted nor in steps
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / rows**0.5
        steps, counts = np.unique(np.diff(order), return_counts=True)
        assert counts.max() <= 12
        assert len(steps) > rows / 2


def test_every_row_comes_anywhere_even_among_few():
    first = np.array([Order(7, seed).take(0, 7) for seed in range(700)])
    for column in first.T:
        counts = np.bincount(column, minlength=7)
        assert ((counts - 100) ** 2 / 100).sum() < 30  # 6 degrees of freedom


def test_78_million_rows_take_no_memory():
    tracemalloc.start()
    order = Order(78_125_000, 42)
    taken = order.take(500 * 78_125_000 - 16, 500 * 78_125_000 + 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(taken) == 32
    assert peak < 100_000


def test_the_order_stays_what_it_was():
    # a run that is resumed with a later version must read the same rows
    assert Order(78_125_000, 42).take(0, 5).tolist() == [12674611, 21213115, 53742524, 3162546, 65117576]
    assert Order(10, 0).take(10, 20).tolist() == Order(10, 0).take(0, 20).tolist()[10:]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="shorter than one sequence"):
        Order(0, 1)
    with pytest.raises(ValueError, match="positions"):
        Order(5, 1).take(3, 2)
