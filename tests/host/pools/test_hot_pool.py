# SPDX-License-Identifier: Apache-2.0
"""The hot pool of one layer never loses, mixes or keeps rows that it should not."""

import mmap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hillinfer.policies.least_recently_used import LeastRecentlyUsed
from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.pools.hot_pool import HotPool

ROW_BYTES = 64
ROWS = 60


def content(rows):
    """Return bytes that tell every row from every other."""
    return np.repeat(np.asarray(rows, np.uint8)[:, None] + 1, ROW_BYTES, axis=1)


class MostRecentlyUsed(PoolPolicy):
    """The worst choice there is: right results must not depend on a good one."""

    def victims(self, last_used, count):
        return np.argsort(-last_used, kind="stable")[:count]


class PoolOfRows(RuleBasedStateMachine):
    @initialize(
        most=st.integers(0, 40), policy=st.sampled_from([LeastRecentlyUsed, MostRecentlyUsed])
    )
    def make(self, most, policy):
        self.most = most
        self.pool = HotPool(ROW_BYTES, most, policy())
        self.pool.cover(ROWS)
        self.used_in = {}
        self.step = 0

    def hot(self):
        slots = self.pool.slots(np.arange(ROWS))
        return {row: int(slot) for row, slot in enumerate(slots) if slot >= 0}

    @rule(
        rows=st.lists(st.integers(0, ROWS - 1), max_size=25, unique=True),
        capacity=st.integers(0, 50),
        new_step=st.booleans(),
    )
    def admit(self, rows, capacity, new_step):
        self.step += new_step
        before = self.hot()
        rows = [row for row in rows if row not in before]
        self.pool.admit(np.array(rows, np.int64), content(rows), self.step, capacity)
        after = self.hot()
        admitted = [row for row in rows if row in after]
        assert admitted == rows[: len(admitted)], "where rows are too many, the last stay out"
        assert set(after) <= set(before) | set(rows)
        gone = set(before) - set(after)
        assert all(self.used_in[row] < self.step for row in gone), "this step's rows stay"
        assert len(gone) <= len(admitted)
        limit = min(capacity, self.most)
        assert all(after[row] < limit for row in admitted)
        if len(admitted) < len(rows):
            # Nothing was left that could have made room.
            below = [row for row, slot in after.items() if slot < limit]
            assert len(below) == limit
            assert all(row in admitted or self.used_in[row] == self.step for row in below)
        self.used_in = {row: self.used_in.get(row) for row in after}
        self.used_in |= dict.fromkeys(admitted, self.step)

    @rule(rows=st.lists(st.integers(0, ROWS - 1), max_size=10, unique=True))
    def touch(self, rows):
        self.step += 1
        slots = self.pool.slots(np.array(rows, np.int64))
        self.pool.touch(slots[slots >= 0], self.step)
        self.used_in |= {row: self.step for row in rows if row in self.used_in}

    @rule(capacity=st.integers(0, 50))
    def shrink(self, capacity):
        before = self.hot()
        used = self.pool.used_rows
        self.pool.shrink(capacity)
        assert self.hot() == {row: slot for row, slot in before.items() if slot < capacity}
        assert self.pool.used_rows == min(used, capacity)
        self.used_in = {row: self.used_in[row] for row in self.hot()}

    @rule(first=st.integers(0, ROWS), count=st.integers(0, 20))
    def forget(self, first, count):
        before = self.hot()
        self.pool.forget(first, min(ROWS, first + count))
        assert self.hot() == {
            row: slot for row, slot in before.items() if not first <= row < first + count
        }
        self.used_in = {row: self.used_in[row] for row in self.hot()}

    @invariant()
    def every_hot_row_is_itself(self):
        if not hasattr(self, "pool"):
            return
        hot = self.hot()
        assert len(set(hot.values())) == len(hot)
        assert all(slot < self.pool.used_rows for slot in hot.values())
        out = np.zeros((ROWS, ROW_BYTES), np.uint8)
        rows = np.array(list(hot), np.int64)
        self.pool.copy_out(self.pool.slots(rows), out, rows)
        np.testing.assert_array_equal(out[rows], content(rows))


def test_against_a_dictionary():
    machine = PoolOfRows.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    machine("runTest").runTest()


@pytest.fixture
def pool():
    made = HotPool(ROW_BYTES, 8, LeastRecentlyUsed())
    made.cover(ROWS)
    return made


def admit(pool, rows, step, capacity=8):
    pool.admit(np.array(rows, np.int64), content(rows), step, capacity)


def hot_rows(pool):
    return np.flatnonzero(pool.slots(np.arange(ROWS)) >= 0).tolist()


def test_the_row_that_was_used_longest_ago_goes(pool):
    admit(pool, [0, 1, 2, 3], 1, 4)
    pool.touch(pool.slots(np.array([0, 2])), 2)
    admit(pool, [10], 3, 4)
    assert hot_rows(pool) == [0, 2, 3, 10]
    admit(pool, [11, 12], 4, 4)
    assert hot_rows(pool) == [2, 10, 11, 12]


def test_rows_of_this_step_are_never_demoted(pool):
    admit(pool, [0, 1, 2], 5, 4)
    admit(pool, [3, 4, 5], 5, 4)
    assert hot_rows(pool) == [0, 1, 2, 3]


def test_a_pool_without_slots_admits_nothing():
    pool = HotPool(ROW_BYTES, 0, LeastRecentlyUsed())
    pool.cover(ROWS)
    admit(pool, [1, 2], 1)
    assert hot_rows(pool) == []
    assert pool.used_rows == 0


def test_covering_more_rows_keeps_what_is_hot(pool):
    admit(pool, [3, 7], 1)
    pool.cover(10_000)
    pool.cover(5)
    assert pool.slots(np.array([3, 7, 9_999])).tolist() == [0, 1, -1]


def resident_bytes(arena):
    """Return how much of an anonymous mapping takes memory, as the kernel counts it."""
    start = np.frombuffer(arena, np.uint8).ctypes.data
    inside = False
    with open("/proc/self/smaps") as mappings:  # noqa: PTH123
        for line in mappings:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low <= start < high
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("mapping not found")


def test_memory_comes_with_use_and_goes_with_shrinking():
    row_bytes, rows = 4096, 2000
    pool = HotPool(row_bytes, rows, LeastRecentlyUsed())
    pool.cover(rows)
    everything = np.arange(rows)
    empty = resident_bytes(pool._arenas[0])
    pool.admit(everything, np.ones((rows, row_bytes), np.uint8), 1, rows)
    full = resident_bytes(pool._arenas[0])
    pool.shrink(100)
    shrunk = resident_bytes(pool._arenas[0])
    assert full - empty >= rows * row_bytes * 0.9
    assert full - shrunk >= (rows - 100) * row_bytes * 0.9
    assert row_bytes >= mmap.PAGESIZE
    # Pages of a shared mapping would leave the process but stay in memory, with what was in them.
    assert pool._rows[:100].all()
    assert not pool._rows[100:].any()
