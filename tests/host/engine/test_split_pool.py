# SPDX-License-Identifier: Apache-2.0
"""Memory that tokens are chosen in, while what was chosen for other layers waits."""

import threading

import numpy as np
import pytest

from hillinfer.engine.coded_call import SplitAhead, SplitPool
from hillinfer.errors import BudgetError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.split import SplitRows, split_bytes


@pytest.fixture
def accountant():
    return Accountant(1 << 20)


@pytest.fixture
def pool(accountant):
    pool = SplitPool(2, 64, accountant)
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
    other = pool.take(9, 3)
    # It was in use meanwhile.
    pool.give(short)
    long = pool.take(9, 3)
    assert long is not short
    assert long is not other
    assert fits(long, 9, 3, 5000)
    pool.give(long)
    # The first text goes on in what there is.
    pool.expect(8, 3, 101)
    assert pool.take(8, 3) is long


def test_whoever_expected_most_there_is_room_for_all(accountant):
    pool, wanted = SplitPool(1, 64, accountant), [(20, 1, 4000), (3000, 2, 3001), (10, 9, 10)]
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


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("room", [(0, 0, 0), (50, 7, 60), (20, 20, 4000)], ids=str)
def test_what_memory_takes_is_known_before_it_is_made(sets, room):
    assert split_bytes(sets, *room) == SplitRows(sets, *room, 64).byte_count
    assert split_bytes(sets, *room) < split_bytes(sets, *(one + 1 for one in room))


def test_memory_is_counted_as_long_as_it_lives(pool, accountant):
    def held():
        return accountant.held()[Part.STAGING]

    # Of the layer that attends, and of the next one: made where it is asked for.
    splits = [pool.take(8, 3) for _ in range(2)]
    own = splits[0].byte_count
    assert held() == 2 * own > 0
    splits += [pool.take(8, 3) for _ in range(2)]
    assert held() == 4 * own
    for split in splits:
        pool.give(split)
    # As many stay as are used again.
    del splits, split
    assert held() == 2 * own
    pool.take(8, 3)
    assert held() == own
    pool.expect(800, 3, 1000)
    grown = pool.take(800, 3).byte_count
    assert held() == grown > own


def test_memory_that_is_refused_is_not_counted_and_is_asked_for_again(pool, accountant):
    held = accountant.held()
    with pytest.raises(BudgetError, match="raise --dram-budget"):
        pool.expect(100_000, 3, 1_000_000)
    assert accountant.held() == held
    assert fits(pool.take(8, 3), 8, 3, 100)
    accountant.raise_to(1 << 30)
    pool.expect(100_000, 3, 1_000_000)
    split = pool.take(100_000, 3)
    assert fits(split, 100_000, 3, 1_000_000)
    assert accountant.held()[Part.STAGING] == 2 * split.byte_count


def test_whoever_makes_room_may_ask_for_more_meanwhile(accountant):
    """Another thread has its own made while the first waits for memory that others give up."""
    pool, accountant.budget_bytes, asked = SplitPool(1, 64, accountant), 1 << 19, []
    accountant.take(Part.HOT, 3 << 17)

    def give_up():
        if not asked:
            asked.append(threading.Thread(target=pool.expect, args=(900, 3, 1000)))
            accountant.give(Part.HOT, 3 << 17)
            asked[0].start()
            asked[0].join(10)

    accountant.on_shortage(give_up)
    pool.expect(1000, 3, 1100)
    assert not asked[0].is_alive()
    split = pool.take(1000, 3)
    assert fits(split, 1000, 3, 1100)
    assert accountant.held()[Part.STAGING] == 2 * split.byte_count
