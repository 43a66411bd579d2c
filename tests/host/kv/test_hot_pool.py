# SPDX-License-Identifier: Apache-2.0
"""The hot pool of one layer never loses, mixes or keeps rows that it should not."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pool_cases import at, candidates, content

from hillinfer.kv.hot_pool import HotPool, rank
from hillinfer.kv.pool_policies import (
    POOL_POLICIES,
    LeastRecentlyUsed,
    PoolPolicy,
    RowHistory,
    make_pool_policy,
)
from hillinfer.kv.sequence import Sequence
from hillinfer.native.structures import Promotion
from hillinfer.native.tables import PoolTables

ROW_BYTES = 64
ROWS = 60
ROW_LISTS = st.lists(st.integers(0, ROWS - 1), max_size=25, unique=True)


class MostRecentlyUsed(PoolPolicy):
    """The worst choice there is: right results must not depend on a good one."""

    def worth(self, rows):
        return (1 << 30) - rows.last_selected.astype(np.int64)


class PoolOfRows(RuleBasedStateMachine):
    """A pool against a dictionary of what is known of each hot row.

    Rows below 30 belong to a sequence of 40 tokens, the others to one of 90; some of both are kept.
    """

    @initialize(
        most=st.integers(0, 40),
        policy=st.sampled_from([MostRecentlyUsed, *POOL_POLICIES.values()]),
    )
    def make(self, most, policy):
        self.most, self.policy = most, policy()
        self.pool = HotPool(ROW_BYTES, most, self.policy)
        self.pool.cover(ROWS)
        self.known = {}
        self.step = 0

    def moment(self, row=0):
        return at(self.step, 40 if row < 30 else 90, sinks=2, recent=5)

    def keys(self, known):
        """Return the ranking of rows: (position, hits, last selection, length) each."""
        columns = np.array(list(known.values()), np.int64).reshape(-1, 4).T
        history = RowHistory(*(column.astype(np.int32) for column in columns), 0.1)
        return dict(zip(known, rank(self.policy, history, self.moment()).tolist(), strict=True))

    def hot(self):
        slots = self.pool.slots(np.arange(ROWS))
        return {row: int(slot) for row, slot in enumerate(slots) if slot >= 0}

    @rule(
        rows=ROW_LISTS, first=st.sampled_from([0, 30]), capacity=st.integers(0, 50),
        new_step=st.booleans(), protect=st.booleans(), seed=st.integers(0, 99),
    )  # fmt: skip
    def promote(self, rows, first, capacity, new_step, protect, seed):
        self.step += new_step
        before = self.hot()
        # Some of them are hot already, as those a thread has promoted meanwhile.
        rows = [row for row in rows if first <= row < first + 30]
        moment = self.moment(first)
        hits = np.random.default_rng(seed).integers(0, 9, len(rows))
        settled_before = self.step if protect else self.step + 1
        used = self.pool.used_rows
        grown = self.pool.growth(len(rows), capacity)
        assert grown <= max(0, min(capacity, self.most) - used)
        self.pool.grow(grown)
        slots = self.pool.used_rows
        assert slots == used + grown
        free = slots - len(before)
        promoted, demoted = self.pool.promote(
            candidates(rows, ROW_BYTES, hits), moment, settled_before
        )
        after = self.hot()
        entered, gone = set(after) - set(before), set(before) - set(after)
        assert (promoted, demoted) == (len(entered), len(gone))
        assert entered <= set(rows)
        assert all(after[row] == slot for row, slot in before.items() if row in after)
        # Free slots first, then equal volumes.
        cold = [row for row in rows if row not in before]
        assert promoted >= min(free, len(cold))
        assert demoted == max(0, promoted - free)
        new = {
            row: (row, hit, self.step, moment.length)
            for row, hit in zip(rows, hits.tolist(), strict=True)
            if row not in before
        }
        keys = self.keys(self.known | new)
        assert all(self.known[row][2] < settled_before for row in gone)
        outside = [keys[row] for row in cold if row not in entered]
        assert max(outside, default=-1) <= min((keys[row] for row in entered), default=1 << 64)
        if outside:
            movable = [keys[r] for r in before if r in after and self.known[r][2] < settled_before]
            assert max(outside) <= min(movable, default=1 << 64), "the best candidates stay out"
        if gone:
            last = sorted((keys[row] for row in entered), reverse=True)[free:]
            lost = sorted(keys[row] for row in gone)
            assert all(a < b for a, b in zip(lost, last, strict=True))
        self.known = {row: self.known.get(row) or new[row] for row in after}

    @rule(rows=ROW_LISTS)
    def note_hits(self, rows):
        self.step += 1
        slots = self.pool.slots(np.array(rows, np.int64))
        self.pool.columns.last_selected[slots[slots >= 0]] = self.step
        for row in set(rows) & set(self.known):
            position, hits, _, length = self.known[row]
            self.known[row] = position, hits, self.step, length

    @rule(settled=st.integers(0, 30), seed=st.integers(0, 99), length=st.integers(30, 99))
    def refresh(self, settled, seed, length):
        counts = np.random.default_rng(seed).integers(0, 9, 30).astype(np.uint16)
        refresh(self.pool, 0, settled, counts, length)
        for row, (position, _, last, _) in self.known.items():
            if row < settled:
                self.known[row] = position, int(counts[row]), last, length

    @rule(capacity=st.integers(0, 50))
    def shrink(self, capacity):
        used, before = self.pool.used_rows, self.hot()
        demoted = self.pool.shrink(capacity, self.moment())
        assert self.pool.used_rows == min(used, capacity)
        after = self.hot()
        assert demoted == len(before) - len(after) == max(0, len(before) - self.pool.used_rows)
        keys = self.keys(self.known)
        gone = [keys[row] for row in before if row not in after]
        assert max(gone, default=-1) <= min((keys[row] for row in after), default=1 << 64)
        self.known = {row: self.known[row] for row in after}

    @rule(first=st.integers(0, ROWS), count=st.integers(0, 20))
    def forget(self, first, count):
        before = self.hot()
        self.pool.forget(first, min(ROWS, first + count))
        assert self.hot() == {
            row: slot for row, slot in before.items() if not first <= row < first + count
        }
        self.known = {row: self.known[row] for row in self.hot()}

    @invariant()
    def every_hot_row_is_itself(self):
        if not hasattr(self, "pool"):
            return
        hot = self.hot()
        assert set(hot) == set(self.known)
        assert sorted(hot) == sorted(self.pool.hot_rows.tolist())
        assert len(set(hot.values())) == len(hot)
        assert all(slot < self.pool.used_rows <= self.most for slot in hot.values())
        rows = np.array(list(hot), np.int64)
        slots = self.pool.slots(rows)
        table = self.pool.columns
        np.testing.assert_array_equal(table.data[slots], content(rows, ROW_BYTES))
        columns = (table.positions, table.counts, table.last_selected, table.lengths)
        found = np.stack([column[slots].astype(np.int64) for column in columns], 1).tolist()
        assert dict(zip(hot, map(tuple, found), strict=True)) == self.known


def test_against_a_dictionary():
    chosen = settings(max_examples=100, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(PoolOfRows, settings=chosen)


# --- single points -------------------------------------------------------------------------


def new_pool(policy="lru", slots=8, most=8):
    made = HotPool(ROW_BYTES, most, make_pool_policy(policy))
    made.cover(128)
    made.grow(slots)
    return made


def promote(pool, rows, moment, counts=0, settled_before=None):
    before = moment.step if settled_before is None else settled_before
    return pool.promote(candidates(rows, ROW_BYTES, counts), moment, before)


def hot_rows(pool):
    return np.flatnonzero(pool.slots(np.arange(ROWS)) >= 0).tolist()


def note(pool, rows, step):
    pool.columns.last_selected[pool.slots(np.array(rows))] = step


def test_the_row_that_was_selected_longest_ago_goes():
    pool = new_pool(slots=4)
    assert promote(pool, [0, 1, 2, 3], at(1)) == (4, 0)
    note(pool, [0, 2], 2)
    assert promote(pool, [10], at(3)) == (1, 1)
    assert hot_rows(pool) == [0, 2, 3, 10]
    promote(pool, [11, 12], at(4))
    assert hot_rows(pool) == [2, 10, 11, 12]


def test_rows_that_someone_may_be_about_to_read_are_not_demoted():
    pool = new_pool("counts", slots=4)
    promote(pool, [0, 1, 2, 3], at(5), counts=1)
    assert promote(pool, [4, 5], at(5), counts=9) == (0, 0)
    assert promote(pool, [4, 5], at(5), counts=9, settled_before=6) == (2, 2)
    assert hot_rows(pool) == [2, 3, 4, 5]


def test_a_candidate_worth_no_more_stays_out():
    pool = new_pool("counts", slots=2)
    promote(pool, [0, 1], at(1), counts=5)
    assert promote(pool, [2, 3], at(2), counts=[4, 4]) == (0, 0)
    assert promote(pool, [2, 3], at(2), counts=[4, 6]) == (1, 1)
    assert hot_rows(pool) == [1, 3]


def test_a_candidate_that_is_equal_in_everything_stays_out():
    pool = new_pool("counts", slots=1)
    moment = at(1)
    pool.promote(candidates([3], ROW_BYTES, 5, positions=[7]), moment, 1)
    # The same position of another sequence.
    assert pool.promote(candidates([43], ROW_BYTES, 5, positions=[7]), moment, 2) == (0, 0)


def test_the_best_candidates_are_taken_when_not_all_fit():
    pool = new_pool("counts", slots=2)
    assert promote(pool, [10, 11, 12, 13], at(1), counts=[3, 9, 1, 8]) == (2, 0)
    assert hot_rows(pool) == [11, 13]


def test_kept_tokens_are_not_demoted_for_others_and_demote_any():
    pool = new_pool("counts", slots=3)
    moment = at(1, length=50, sinks=1, recent=2)
    promote(pool, [0, 48, 30], moment)
    assert promote(pool, [31, 32], at(2, 50, 1, 2), counts=60_000) == (1, 1)
    assert hot_rows(pool) == [0, 32, 48]
    assert promote(pool, [49], at(3, 50, 1, 2)) == (1, 1)
    assert hot_rows(pool) == [0, 48, 49]


def test_a_recent_token_is_kept_only_while_it_is_recent():
    pool = new_pool("counts", slots=2)
    promote(pool, [10, 11], at(1, length=12, recent=2))
    assert promote(pool, [5], at(2, length=12, recent=2), counts=9) == (0, 0)
    refresh(pool, 0, 12, np.zeros(64, np.uint16), 40)
    assert promote(pool, [5], at(2, length=40, recent=2), counts=9) == (1, 1)


def test_tokens_of_another_sequence_are_kept_by_that_ones_length():
    pool = new_pool("counts", slots=2)
    promote(pool, [10, 11], at(1, length=12, recent=2))
    assert promote(pool, [5], at(2, length=1000, recent=2), counts=9) == (0, 0)
    pool = new_pool("counts", slots=2)
    promote(pool, [10, 11], at(1, length=1000, recent=2))
    assert promote(pool, [1], at(2, length=6, recent=2), counts=9) == (1, 1)


def test_pins_are_clipped_to_the_pool_and_the_newest_win():
    """Ten rows are pinned and four fit: hits come first, as among all pins, then what is newer."""
    pool = new_pool("paper", slots=4)
    moment = at(1, length=50, alpha=0.2)
    promote(pool, range(40, 50), moment)
    assert hot_rows(pool) == [46, 47, 48, 49]
    assert promote(pool, [39, 20], at(2, 50, alpha=0.2), counts=60_000) == (0, 0)
    assert promote(pool, [41], at(2, 50, alpha=0.2), counts=1) == (1, 1)
    assert hot_rows(pool) == [41, 47, 48, 49]


def test_hits_that_fade_are_learnt_of_rows_that_are_not_selected():
    pool = new_pool("decayed", slots=2)
    promote(pool, [0, 1], at(1), counts=[60_000, 50_000])
    assert promote(pool, [2], at(2), counts=8192) == (0, 0)
    faded = np.full(64, 100, np.uint16)
    refresh(pool, 0, 1, faded, 1 << 20)
    assert promote(pool, [2], at(2), counts=8192) == (1, 1)
    assert hot_rows(pool) == [1, 2]


@pytest.mark.parametrize("fades", [0, 1, 2, 7, 40])
def test_hits_that_fade_while_others_take_steps_are_those_of_steps_without_a_hit(fades):
    policy, pool = make_pool_policy("decayed"), new_pool("decayed", 64, 64)
    promote(pool, range(64), at(1))
    counts = np.linspace(0, 65_535, 64).astype(np.uint16)
    refresh(pool, 0, 64, counts, 1 << 20, fades)
    wanted = counts.copy()
    for _ in range(fades):
        policy.tally(wanted, np.zeros(0, np.int64))
    slots = pool.slots(np.arange(64))
    assert pool.columns.counts[slots].tolist() == wanted.tolist()
    # The twin: once more is seen.
    refresh(pool, 0, 64, counts, 1 << 20, fades + 1)
    assert pool.columns.counts[slots].tolist() != wanted.tolist() or fades == 40


def refresh(pool, group, settled, counts, length, fades=0):
    """Let a pool learn the hits of a sequence whose first group this is."""
    sequence = Sequence(1, ROW_BYTES)
    sequence.append_groups([group])
    sequence.hits.cover(0, len(counts))
    sequence.hits.counts[0][: len(counts)] = counts
    pool.refresh(0, sequence, settled, length, fades)


def test_refreshing_leaves_rows_of_other_sequences_alone():
    pool = new_pool("counts", slots=2)
    # Both stand at position 3, of two sequences whose groups differ.
    rows = candidates([3, 67], ROW_BYTES, 5, positions=[3, 3])
    pool.promote(rows, at(1, length=100), 1)
    refresh(pool, 1, 10, np.arange(10, dtype=np.uint16), 77)
    slots = pool.slots(np.array([3, 67]))
    assert pool.columns.counts[slots].tolist() == [5, 3]
    assert pool.columns.lengths[slots].tolist() == [100, 77]


def promote_at(pool, positions):
    """Promote rows by number to what stands at their positions, five hits each."""
    rows = candidates([*positions], ROW_BYTES, 5, positions=[*positions.values()])
    pool.promote(rows, at(1, length=1000), 1)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("free", [0, 2])
@pytest.mark.parametrize("settled", [0, 4, 10])
def test_refreshing_changes_own_settled_rows_and_no_other(settled, free, others):
    """Whether all slots are the sequence's, as in most steps, or not."""
    pool = new_pool("counts", slots=6 + 2 * others + free, most=20)
    known = {row: row - 64 for row in (73, 65, 70, 67, 64, 71)}
    promote_at(pool, known)
    if others:
        promote_at(pool, {3: 3, 8: 8})
    counts = np.arange(100, 110, dtype=np.uint16)
    refresh(pool, 1, settled, counts, 77)
    rows = [*known, *((3, 8) if others else ())]
    slots = pool.slots(np.array(rows))
    expected = [
        (100 + known[row], 77) if row in known and known[row] < settled else (5, 1000)
        for row in rows
    ]
    learnt = zip(pool.columns.counts[slots], pool.columns.lengths[slots], strict=True)
    assert [(int(count), int(length)) for count, length in learnt] == expected
    # Free slots stay as they were.
    of_all = pool.columns.lengths[: pool.used_rows]
    assert (of_all == 77).sum() == sum(length == 77 for _, length in expected)


@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_a_pool_without_slots_promotes_nothing(policy):
    pool = new_pool(policy, slots=0, most=0)
    assert pool.growth(2, 5) == 0
    assert promote(pool, [1, 2], at(1)) == (0, 0)
    assert pool.shrink(0, at(1)) == 0
    assert hot_rows(pool) == []
    assert pool.used_rows == 0


def test_growth_is_what_candidates_need_and_capacity_allows():
    pool = new_pool(slots=0)
    assert [pool.growth(count, capacity) for count, capacity in ((3, 5), (9, 5), (9, 99))] == [
        3,
        5,
        8,
    ]
    pool.grow(3)
    promote(pool, [1], at(1))
    assert pool.growth(2, 8) == 0
    assert pool.growth(4, 8) == 2
    assert pool.growth(4, 1) == 0


def test_covering_more_rows_keeps_what_is_hot():
    pool = new_pool()
    promote(pool, [3, 7], at(1))
    before = pool.slots(np.array([3, 7])).tolist()
    pool.cover(10_000)
    pool.cover(5)
    assert pool.slots(np.array([3, 7, 9_999])).tolist() == [*before, -1]


def test_slots_that_were_given_back_are_free_when_they_come_again():
    pool = new_pool("counts", slots=8)
    promote(pool, range(8), at(1), counts=np.arange(8))
    pool.shrink(2, at(1))
    assert hot_rows(pool) == [6, 7]
    pool.grow(6)
    assert hot_rows(pool) == [6, 7]
    assert promote(pool, [20, 21, 22], at(2)) == (3, 0)
    assert hot_rows(pool) == [6, 7, 20, 21, 22]


def mapped_bytes(array, kind="Rss:"):
    """Return how much of the mappings that an array lies in takes memory, as the kernel counts."""
    start, inside, found = array.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            first, last = (int(end, 16) for end in word.split("-"))
            inside = first < start + array.nbytes and start < last
        elif inside and word == kind:
            found += int(line.split()[1]) << 10
    return found


def test_memory_comes_with_use_and_goes_with_shrinking():
    row_bytes, rows = 4096, 2000
    pool = HotPool(row_bytes, rows, LeastRecentlyUsed())
    pool.cover(rows)
    kept = pool.columns.data
    empty = mapped_bytes(kept)
    pool.grow(rows)
    pool.promote(candidates(np.arange(rows), row_bytes), at(1), 1)
    full = mapped_bytes(kept)
    pool.shrink(100, at(1))
    shrunk = mapped_bytes(kept)
    assert full - empty >= rows * row_bytes * 0.9
    assert full - shrunk >= (rows - 100) * row_bytes * 0.9
    assert row_bytes >= mmap.PAGESIZE
    # Pages of a shared mapping would leave the process but stay in memory, with what was in them.
    assert (kept[:100] == content(pool.columns.rows[:100], row_bytes)).all()
    assert not kept[100:].any()


# --- huge pages ----------------------------------------------------------------------------

WIDE_ROW, HUGE_PAGE, COLLAPSE = 768, 2 << 20, 25


@pytest.fixture
def huge_pages():
    """Skips where the system makes none on demand."""
    with mmap.mmap(-1, 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(2 * HUGE_PAGE)
        try:
            memory.madvise(
                COLLAPSE,
                -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE,
                HUGE_PAGE,
            )
        except OSError as error:
            pytest.skip(f"no huge pages on demand: {error}")


def test_rows_that_are_wholly_taken_lie_in_huge_pages(huge_pages):
    tables = PoolTables(40_000, WIDE_ROW)
    tables.grow(1000)
    assert mapped_bytes(tables.data, "AnonHugePages:") == 0, (
        "memory that nobody took is no part of it"
    )
    rows = np.arange(1000 * WIDE_ROW, dtype=np.uint32).astype(np.uint8).reshape(1000, -1)
    tables.data[:1000] = rows
    for _ in range(9):
        tables.grow(1000)
    tables.data[1000:10_000] = rows[0]
    taken = 10_000 * WIDE_ROW
    assert taken - 2 * HUGE_PAGE < mapped_bytes(tables.data, "AnonHugePages:") <= taken
    assert np.array_equal(tables.data[:1000], rows)
    for most in (3000, 500):
        tables.shrink(most, Promotion(alpha=0.1))
        tables.grow(9000 - most)
        assert np.array_equal(tables.data[:500], rows[:500])
    assert not tables.data[3000:9000].any(), "what was given back came again"
