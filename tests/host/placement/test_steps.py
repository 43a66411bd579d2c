# SPDX-License-Identifier: Apache-2.0
"""Hulls hold what is worth choosing, and merged steps keep to a budget and to the best gains."""

import itertools
import random

import pytest

from hillinfer.placement.steps import Point, SlopeMerge, upper_hull


def numbers(points, base=0.0):
    return [point.number for point in upper_hull(points, base)]


def test_a_hull_has_what_some_price_would_choose():
    points = [
        Point(0, 10, 5.0),
        Point(1, 10, 4.0),  # As large, and worse.
        Point(2, 20, 6.0),  # Below the line from 0 to 3.
        Point(3, 30, 9.0),
        Point(4, 40, 8.0),  # Larger, and worse.
        Point(5, 60, 10.0),
    ]
    assert numbers(points) == [0, 3, 5]
    assert numbers(reversed(points)) == [0, 3, 5]
    # What is offered for nothing hides what is worth less.
    assert numbers(points, base=5.0) == [3, 5]
    assert numbers(points, base=10.0) == []
    assert numbers([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_hull_is_what_all_prices_choose(seed):
    draw = random.Random(seed)
    points = [Point(one, draw.randrange(1, 50), draw.uniform(0, 9)) for one in range(12)]
    free = Point(-1, 0, 1.0)
    prices = [draw.uniform(0, 3) for _ in range(400)] + [0.0]
    chosen = {
        max([free, *points], key=lambda one: one.value - price * one.byte_count) for price in prices
    }
    hull = upper_hull(points, free.value)
    assert chosen <= {free, *hull}
    slopes = [
        (upper.value - lower.value) / (upper.byte_count - lower.byte_count)
        for lower, upper in itertools.pairwise([free, *hull])
    ]
    assert slopes == sorted(slopes, reverse=True)
    assert all(slope > 0 for slope in slopes)


def merged(hulls, budget, weights=None, hysteresis=0.0):
    merge = SlopeMerge(hysteresis)
    for name, points in hulls.items():
        merge.put(name, (weights or {}).get(name, 1.0), points, 0.0)
    merge.settle(budget)
    merge.keep()
    return merge


def levels(merge, names):
    return {name: merge.point(name) and merge.point(name).number for name in names}


def test_steps_are_taken_by_gain_per_byte():
    hulls = {"a": [Point(0, 10, 5.0), Point(1, 20, 6.0)], "b": [Point(0, 10, 3.0)]}
    assert levels(merged(hulls, 10), "ab") == {"a": 0, "b": None}
    assert levels(merged(hulls, 20), "ab") == {"a": 0, "b": 0}
    assert levels(merged(hulls, 30), "ab") == {"a": 1, "b": 0}
    # Asked for four times as often, the second step is worth more than the other's first.
    assert levels(merged(hulls, 20, {"a": 4.0}), "ab") == {"a": 1, "b": None}


def test_a_step_that_does_not_fit_is_passed_over_or_takes_the_place_of_smaller_ones():
    hulls = {"small": [Point(0, 10, 5.0)], "large": [Point(0, 95, 40.0)]}
    # By gain per byte the small one is first; the large one gains more than it.
    merge = merged(hulls, 100)
    assert levels(merge, hulls) == {"small": None, "large": 0}
    assert merge.used == 95
    merge = merged({**hulls, "large": [Point(0, 101, 40.0)]}, 100)
    assert levels(merge, hulls) == {"small": 0, "large": None}
    assert merge.wanted == pytest.approx(40 / 101)


def test_an_option_beside_the_hull_fills_what_is_left():
    hulls = {
        "a": [Point(0, 10, 5.0), Point(1, 50, 6.0), Point(2, 100, 40.0)],
        "b": [Point(0, 25, 1.0)],
    }
    merge = merged(hulls, 80)
    assert levels(merge, "ab") == {"a": 1, "b": 0}
    assert merge.used == 75
    # With more room the hull's own step is taken, and nothing is counted twice.
    merge.settle(125)
    assert levels(merge, "ab") == {"a": 2, "b": 0}
    assert merge.used == 125
    merge.settle(34)
    assert levels(merge, "ab") == {"a": 0, "b": None}
    assert merge.used == 10


def test_a_smaller_budget_and_a_removal_are_followed_both_ways():
    hulls = {"a": [Point(0, 10, 5.0)], "b": [Point(0, 10, 3.0)]}
    merge = merged(hulls, 20)
    merge.settle(15)
    assert levels(merge, "ab") == {"a": 0, "b": None}
    assert merge.used == 10
    merge.remove("a")
    merge.settle(15)
    assert levels(merge, "ab") == {"a": None, "b": 0}
    assert merge.used == 10


def test_hysteresis_keeps_what_gains_almost_as_much():
    hulls = {"a": [Point(0, 10, 5.0)], "b": [Point(0, 10, 5.0)]}
    for hysteresis, expected in ((0.1, "a"), (0.0, "b")):
        merge = merged(hulls, 10, {"a": 1.01}, hysteresis)
        assert merge.point("a")
        merge.put("b", 1.05, hulls["b"], 0.0)
        merge.settle(10)
        assert [name for name in "ab" if merge.point(name)] == [expected]


def test_a_document_keeps_its_option_when_only_its_weight_changes():
    points = [Point(0, 10, 5.0), Point(1, 20, 6.0)]
    merge = merged({"a": points}, 20)
    merge.moved.clear()
    merge.put("a", 2.0, points, 0.0)
    assert merge.point("a").number == 1
    assert merge.moved == set()
    merge.put("a", 2.0, [Point(7, 15, 5.0), Point(8, 30, 6.0)], 0.0)
    assert merge.point("a").number == 7
    assert merge.moved == {"a"}
    assert merge.used == 15


def test_entries_that_are_no_longer_true_do_not_pile_up():
    points = [Point(0, 10, 5.0)]
    merge = merged({"a": points, "b": points}, 10)
    for number in range(2000):
        merge.put("a", 1.0 + number % 3, points, 0.0)
        merge.settle(10)
    assert len(merge._up) + len(merge._down) < 200
