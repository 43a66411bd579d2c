# SPDX-License-Identifier: Apache-2.0
"""Memory that tokens are chosen in, while what was chosen for other layers waits."""

import threading

import numpy as np
import pytest

from hillinfer.engine.coded_call import SplitAhead, SplitPool


@pytest.fixture
def pool():
    pool = SplitPool(2, 64)
    pool.expect(8, 3, 100)
    return pool


def fits(split, count, exact, tokens):
    return all(own >= one for own, one in zip(split.room, (count, exact, tokens), strict=True))


def test_memory_that_was_given_back_is_taken_again(pool):
    first, second = pool.take(8, 3), pool.take(8, 3)
    assert first is not second
    pool.give(first)
    assert pool.take(8, 3) is first
    assert fits(first, 8, 3, 100)


def test_memory_of_a_shorter_text_is_not_taken_again(pool):
    short = pool.take(8, 3)
    pool.expect(9, 3, 5000)
    # It was in use meanwhile.
    pool.give(short)
    long = pool.take(9, 3)
    assert long is not short
    assert fits(long, 9, 3, 5000)
    pool.give(long)
    # The first text goes on in what there is.
    pool.expect(8, 3, 101)
    assert pool.take(8, 3) is long


def test_whoever_expected_most_there_is_room_for_all():
    pool, wanted = SplitPool(1, 64), [(20, 1, 4000), (3000, 2, 3001), (10, 9, 10)]
    beside = [threading.Thread(target=pool.expect, args=one) for one in wanted]
    for one in beside:
        one.start()
    for one in beside:
        one.join()
    split = pool.take(1, 1)
    assert all(fits(split, *one) for one in wanted)


def test_what_is_told_is_what_a_layer_attends_to(pool):
    sets, exact = [np.arange(0, 10, 2), np.arange(5, 10)], [np.array([2]), np.array([9])]
    ahead = SplitAhead(None, pool.told(sets, exact, 10))
    assert np.array_equal(ahead.sets, sets)
    assert np.array_equal(ahead.exact, exact)
    # The twin: other tokens are others.
    assert not np.array_equal(SplitAhead(None, pool.told(sets[::-1], exact, 10)).sets, sets)


def test_memory_says_how_much_is_to_be_chosen_in_it(pool):
    split = pool.take(7, 2)
    assert (split.table.set_rows, split.exact.table.set_rows) == (7, 2)
