# SPDX-License-Identifier: Apache-2.0
"""Belady's optimum is the best of all schedules there are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_bench.replay.belady import most_hits

ITEMS = 6


def arrays(lists):
    return [np.array(sorted(one), np.int64) for one in lists]


def hits(uses, arrivals, capacity):
    return sum(int(some.sum()) for some in most_hits(arrays(uses), arrays(arrivals), capacity))


def tried_all(uses, arrivals, capacity):
    """Return the most hits over every pool that could be held at every step."""
    best = {frozenset(): 0}
    before = frozenset()
    for wanted, arriving in zip(uses, arrivals, strict=True):
        reached = {}
        for pool, count in best.items():
            possible = sorted(pool | before | set(arriving))
            for size in range(min(capacity, len(possible)) + 1):
                for held in map(frozenset, combinations(possible, size)):
                    found = count + len(held & set(wanted))
                    reached[held] = max(reached.get(held, 0), found)
        best, before = reached, frozenset(wanted)
    return max(best.values())


@st.composite
def traces(draw):
    steps = draw(st.integers(1, 5))
    uses = draw(
        st.lists(st.sets(st.integers(0, ITEMS - 1), max_size=4), min_size=steps, max_size=steps)
    )
    # Every item arrives once, perhaps after it was first used; a use before is a plain miss.
    when = draw(st.lists(st.integers(0, steps - 1), min_size=ITEMS, max_size=ITEMS))
    arrivals = [{item for item in range(ITEMS) if when[item] == step} for step in range(steps)]
    for step in range(steps):
        for item in list(uses[step]):
            if when[item] > step:
                uses[step].discard(item)
    return uses, arrivals


@settings(max_examples=150, deadline=None)
@given(trace=traces(), capacity=st.integers(0, 4))
def test_no_schedule_has_more_hits_and_one_has_as_many(trace, capacity):
    assert hits(*trace, capacity) == tried_all(*trace, capacity)


def test_what_is_used_furthest_in_the_future_is_given_up():
    uses = [{0}, {1}, {2}, {1}, {2}, {0}]
    arrivals = [{0, 1, 2}, *[set()] * 5]
    found = most_hits(arrays(uses), arrays(arrivals), 2)
    assert [bool(some[0]) for some in found] == [True, True, False, True, True, False]
    # The twin: room for one more holds all three throughout.
    assert hits(uses, arrivals, 3) == 6


def test_nothing_is_prefetched():
    """An item that was neither used nor arriving just before cannot come back."""
    uses = [{0, 1}, {2, 3}, {0, 1}]
    assert hits(uses, [{0, 1, 2, 3}, set(), set()], 2) == tried_all(
        uses, [{0, 1, 2, 3}, set(), set()], 2
    )
    assert hits(uses, [{0, 1, 2, 3}, set(), set()], 4) == 6


@pytest.mark.parametrize("capacity", [0, 3])
def test_no_uses_are_no_hits(capacity):
    assert hits([set(), set()], [{0, 1}, set()], capacity) == 0
