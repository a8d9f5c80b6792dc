"""The search for the best options of a cell: its ladders, and the laws that every step of it keeps."""

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.climb import Axis, Point, best_point, climb, inside

LR = Axis("inner.lr", start=1e-3, factor=2.0)
MOMENTUM = Axis("outer.momentum", start=0.8, step=0.1, low=0.0, high=0.95)

# ladders


def test_ladders_multiply_add_or_list():
    assert [LR.value(k) for k in (-2, 0, 3)] == [0.00025, 0.001, 0.008]
    assert [MOMENTUM.value(k) for k in (-9, -8, 0, 1, 2)] == [None, 0.0, 0.8, 0.9, None]
    listed = Axis("outer.lr", values=(0.7, 1.0, 1.8))
    assert [listed.value(k) for k in (-1, 0, 2, 3)] == [None, 0.7, 1.8, None]
    assert Axis("inner.lr", start=2.8e-3, factor=math.sqrt(2)).value(1) == 0.00396  # three digits, the same everywhere


# the search


def search(axes: tuple[Axis, ...], loss: Callable[[Point], float], trials: int) -> dict[Point, float]:
    """Follow the search to its end; every step of it keeps the laws."""
    losses: dict[Point, float] = {}
    while todo := climb(axes, losses, trials):
        assert len(set(todo)) == len(todo)
        assert not set(todo) & losses.keys()
        assert len(losses) + len(todo) <= max(trials, 1)
        assert all(axis.value(k) is not None for point in todo for axis, k in zip(axes, point, strict=True))
        losses |= {point: loss(point) for point in todo}
    return losses


def bowl(centre: Point, tilt: float = 0.0) -> Callable[[Point], float]:
    return lambda p: sum((a - c) ** 2 * (1 + i) for i, (a, c) in enumerate(zip(p, centre, strict=True))) + tilt * p[0]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=3), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_search_keeps_its_laws_and_uses_all_its_trials(centre, trials):
    axes = tuple(Axis(f"a{i}", start=1.0, factor=2.0) for i in range(len(centre)))
    losses = search(axes, bowl(tuple(centre)), trials)
    assert len(losses) == trials  # the same number for every cell: no method gets more chances
    assert (0,) * len(axes) in losses
    if inside(axes, losses):
        assert best_point(losses) == tuple(centre)  # of a bowl, the only point that is inside


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_with_trials_enough_the_optimum_is_found_and_inside(centre):
    axes = tuple(Axis(f"a{i}", start=1.0, factor=2.0) for i in range(len(centre)))
    losses = search(axes, bowl(tuple(centre)), 6 * sum(map(abs, centre)) + 6 * len(centre) + 1)
    assert best_point(losses) == tuple(centre)
    assert inside(axes, losses)


def test_a_bounded_ladder_is_left_nowhere_and_its_end_counts_as_inside():
    losses = search((MOMENTUM,), bowl((5,)), 10)  # the best lies beyond the last rung
    assert best_point(losses) == (1,)
    assert inside((MOMENTUM,), losses)
    assert len(losses) == 10  # from 0.0 to 0.9
    assert search((MOMENTUM,), bowl((0,)), 50).keys() == {(k,) for k in range(-8, 2)}  # no more than there are


def test_too_few_trials_leave_the_optimum_at_an_edge():
    losses = search((LR,), bowl((9,)), 4)
    assert len(losses) == 4
    assert not inside((LR,), losses)


def test_what_is_not_finite_never_wins():
    losses: dict[Point, float] = {(0,): math.nan, (1,): math.inf, (-1,): 7.0, (2,): -math.inf}
    del losses[(2,)]
    assert best_point(losses) == (-1,)
    assert best_point({(0,): 1.0, (-1,): 1.0}) == (-1,)
    diverging = search((LR,), lambda p: math.inf if p[0] > 1 else -p[0], 8)
    assert best_point(diverging) == (1,)
    assert inside((LR,), diverging)


def test_nothing_to_tune_is_nothing_to_search():
    assert climb((), {}, 10) == []


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_search_goes_on_the_same_from_any_part_of_it(data):
    axes = (LR, MOMENTUM)
    loss = bowl((2, -1), tilt=0.1)
    whole = search(axes, loss, 12)
    known = {p: v for p, v in whole.items() if data.draw(st.booleans())}
    again: dict[Point, float] = {}
    while todo := climb(axes, again, 12):
        again |= {p: known.get(p, loss(p)) for p in todo}
    assert again == whole
