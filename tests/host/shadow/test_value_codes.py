# SPDX-License-Identifier: Apache-2.0
"""Which codes of values stay in DRAM, under which numbers they are found, and what they take."""

import ctypes
import sys
from functools import partial

import numpy as np
import pytest
import torch

from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.signatures import CodeSlots
from hillinfer.shadow import values as values_module
from hillinfer.shadow.values import CodePool, ValueCodes, slot_bytes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(16, 2, 1)


def codes_of(rows):
    return np.repeat(np.asarray(rows, np.uint8)[:, None], 10, axis=1)


def found(pool, rows, numbers=None):
    """First byte of each row's codes, None where they are not kept."""
    rows = np.asarray(rows)
    numbers = np.zeros(len(rows), np.int64) if numbers is None else np.asarray(numbers)
    addresses, kept = pool.find(rows, numbers)
    values = [ctypes.c_uint8.from_address(int(one)).value if one else None for one in addresses]
    del kept
    return values


def offer(pool, rows, number=0):
    rows = np.asarray(rows)
    return pool.offer(rows, np.full(len(rows), number), codes_of(rows))


@pytest.fixture
def pool():
    made = CodePool(10)
    made.cover(300)
    made.resize(64)
    return made


def test_codes_are_found_by_row_and_number(pool):
    assert offer(pool, [5, 9, 200]) == 3
    assert found(pool, [9, 5, 6, 200]) == [9, 5, None, 200]
    assert found(pool, [9, 5], [0, 1]) == [9, None]
    # Coded anew under another number, they take the place that they have.
    assert offer(pool, [9], 1) == 1
    assert found(pool, [9, 9], [0, 1]) == [None, 9]
    assert pool.used == 3


def test_what_is_wanted_more_stays(pool):
    offer(pool, range(64))
    for _ in range(3):
        pool.begin_step()
        pool.want(np.arange(10, 64))
    pool.want(np.array([100]))
    assert offer(pool, [100, 101]) == 1
    assert found(pool, [100, 101]) == [100, None]
    assert [one for one in found(pool, range(10, 64)) if one is None] == []
    assert found(pool, range(10)).count(None) == 1
    more = np.arange(200, 211)
    for _ in range(5):
        pool.want(more)
    # Much more than all of them is wanted now, and the least give way to it.
    assert offer(pool, more) == 11
    assert found(pool, [*range(10), 100]) == [None] * 11
    assert [one for one in found(pool, range(10, 64)) if one is None] == [None]


def test_wants_of_long_ago_count_less(pool):
    offer(pool, range(64))
    pool.want(np.arange(64))
    for _ in range(400):
        pool.begin_step()
    pool.want(np.array([100, 101]))
    assert offer(pool, [100, 101]) == 2


def test_worth_goes_on_in_another_pool(pool):
    for _ in range(32):
        pool.want(np.arange(64))
        pool.begin_step()
    pool.want(np.array([100]))
    worth = pool.worth(np.arange(400))
    # 32 steps halve what a time was worth; tokens that no table has are worth nothing.
    assert worth[100] == 1
    assert 22 < worth[0] == worth[63] < 24
    assert not worth[101:].any()
    other = CodePool(10)
    other.cover(400)
    other.resize(64)
    for _ in range(32):
        other.begin_step()
    other.recall(np.arange(400), worth)
    np.testing.assert_allclose(other.worth(np.arange(400)), worth, rtol=1e-2)
    offer(other, range(64))
    other.want(np.array([100, 101]))
    assert offer(other, [100, 101]) == 0
    # Without it they would stay.
    other.forget(np.arange(64))
    offer(other, range(64))
    assert offer(other, [100, 101]) == 2


def test_what_is_recalled_takes_no_worth_away(pool):
    pool.want(np.array([7, 8]))
    pool.recall(np.array([7, 9]), np.array([0.5, 3], np.float16))
    assert pool.worth(np.array([7, 8, 9])).tolist() == [1, 1, 3]


def test_a_pool_that_shrinks_forgets_and_one_that_grows_keeps(pool):
    offer(pool, range(64))
    pool.resize(128)
    assert found(pool, range(64)) == list(range(64))
    offer(pool, range(64, 128))
    pool.resize(64)
    assert found(pool, range(64)) == list(range(64))
    assert found(pool, range(64, 128)) == [None] * 64
    pool.resize(0)
    assert found(pool, [1]) == [None]
    assert offer(pool, [1]) == 0


def test_numbers_are_nobody_elses():
    values = ValueCodes(SPEC, 2, Accountant(1 << 20), lambda: 0, lambda _: None)
    statistics = ChannelStatistics(np.zeros((2, 16), np.int8), np.zeros((2, 16), np.int32))
    one = values.numbered(statistics)
    assert values.numbered(statistics).number != one.number
    assert one.statistics is statistics


def test_codes_take_what_is_left_and_give_way():
    accountant, aside = Accountant(1 << 20), []
    values = ValueCodes(SPEC, 2, accountant, lambda: 1000, aside.append)
    statistics = ChannelStatistics(np.full((2, 16), 4, np.int8), np.zeros((2, 16), np.int32))
    own = values.numbered(statistics)
    rows = np.arange(1000)
    codes = values.encode(torch.randn(1000, 2, 16).half(), own)
    values.offer(0, rows, np.full(1000, own.number), codes)
    addresses, _ = values.find(0, rows, np.full(1000, own.number))
    assert (addresses != 0).all()
    assert accountant.held()[Part.HOT] == values.held_bytes == aside[-1] > 0
    assert values.held_bytes % (2 * 64 * slot_bytes(SPEC)) == 0
    # Something else needs nearly all of it.
    accountant.take(Part.OTHER, (1 << 20) - accountant.held()[Part.OTHER] - 50_000)
    assert accountant.held()[Part.HOT] == values.held_bytes <= 50_000
    addresses, _ = values.find(0, rows, np.full(1000, own.number))
    assert 0 < np.count_nonzero(addresses) < 1000
    values.begin_step()
    assert sum(accountant.held().values()) <= 1 << 20


def test_codes_that_nobody_makes_room_for_stay_as_few_as_they_are():
    accountant, aside = Accountant(1 << 20), []
    # Hot rows that do not give way, though they need none of it.
    values = ValueCodes(SPEC, 2, accountant, lambda: 0, aside.append)
    accountant.take(Part.HOT, (1 << 20) - 100_000)
    own = values.numbered(
        ChannelStatistics(np.full((2, 16), 4, np.int8), np.zeros((2, 16), np.int32))
    )
    values.offer(
        0, np.arange(9), np.full(9, own.number), values.encode(torch.zeros(9, 2, 16).half(), own)
    )
    assert values.held_bytes == aside[-1] == 0
    assert accountant.held()[Part.HOT] == (1 << 20) - 100_000


# --- interrupts ---------------------------------------------------------------------------


def broken_off(act, line, whose=""):
    """Let Ctrl-C come before so many lines of the module, or of one class, were run.

    Returns whether it came.
    """
    left = line

    def watch(frame, event, _):
        nonlocal left
        code = frame.f_code
        is_own = code.co_filename == values_module.__file__
        if not (is_own and code.co_qualname.startswith(whose)):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


CHANGES = {
    "cover": lambda pool: pool.cover(9000),
    "grow": lambda pool: pool.resize(192),
    "shrink": lambda pool: pool.resize(64),
}


def is_whole(pool):
    """Say whether the library sees what there is, and as much of all of it."""
    table, own = CodeSlots.from_address(pool.address), pool.columns
    columns = own.slots, own.worth, own.rows, own.numbers, own.bases
    seen = table.slot_of_row, table.worth, table.rows, table.numbers, table.chunks
    return (
        list(seen) == [one.ctypes.data for one in columns]
        and table.row_count == len(own.slots) == len(own.worth)
        and table.slot_count == len(own.rows) == len(own.numbers) == 64 * len(own.chunks)
        and [one.ctypes.data for one in own.chunks] == own.bases.tolist()
    )


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_leaves_a_pool_that_is_whole(change):
    """The library is never told of some columns and not of others."""
    line, came = 0, True
    while came:
        pool = CodePool(10)
        pool.cover(300)
        pool.resize(128)
        offer(pool, range(128))
        assert is_whole(pool)
        came = broken_off(partial(CHANGES[change], pool), line)
        line += 1
        assert is_whole(pool)
        CHANGES[change](pool)
        assert is_whole(pool)
        kept = [one if change != "shrink" or one < 64 else None for one in range(128)]
        assert found(pool, range(128)) == kept
    assert line > 5
    # The twin: a pool that was told of half a change is seen.
    CodeSlots.from_address(pool.address).slot_count += 64
    assert not is_whole(pool)


def test_after_an_interrupt_the_next_step_counts_what_there_is():
    """Ctrl-C comes when some layers have given up codes, and others have not."""
    line, came, halves = 0, True, 0
    while came:
        accountant, aside, least = Accountant(1 << 20), [], [1000]
        values = ValueCodes(SPEC, 3, accountant, partial(least.__getitem__, 0), aside.append)
        values.cover(1000)
        # Hot rows want more of it.
        least[0] = (1 << 20) - values.held_bytes // 2
        came = broken_off(values.begin_step, line, "CodePool.")
        line += 1
        halves += len({one.capacity for one in values.layers}) > 1
        values.begin_step()
        capacities = {one.capacity for one in values.layers}
        assert len(capacities) == 1
        assert values.held_bytes == 3 * capacities.pop() * slot_bytes(SPEC) == aside[-1]
        assert accountant.held()[Part.HOT] == values.held_bytes
    assert halves > 5
