# SPDX-License-Identifier: Apache-2.0
"""What the native library promotes and demotes is what numpy does, whoever ranks the rows."""

import threading

import numpy as np
import pytest
from pool_cases import FAR, at, candidates
from twins.numpy_hot_pool import NumpyHotPool

from hillinfer.kv.hot_pool import NOWHERE, SLOT_BYTES, Candidates, HotPool, PoolMoment
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import (
    POOL_POLICIES,
    RANKED_BY_PYTHON,
    LayerShares,
    PoolPolicy,
    make_pool_policy,
    native_worth,
)
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import PoolSizes

ROWS, ROW_BYTES, SLOTS = 2000, 64, 300


class Oldest(PoolPolicy):
    """A policy that nobody but Python knows."""

    def worth(self, rows):
        return (1 << 30) - rows.positions.astype(np.int64)


POLICIES = {**{name: make_pool_policy(name) for name in POOL_POLICIES}, "of its own": Oldest()}


def pool_of(kind, policy, slots=SLOTS):
    pool = kind(ROW_BYTES, slots, policy)
    pool.cover(ROWS)
    pool.grow(slots)
    return pool


def steps(seed, count=30):
    """Yield candidates, moments and what is settled, of lengths that grow."""
    chance = np.random.default_rng(seed)
    for step in range(1, count + 1):
        rows = chance.choice(ROWS, int(chance.integers(1, 200)), replace=False)
        hits = chance.integers(0, 6, len(rows))
        length = 1500 + 10 * step
        moment = PoolMoment(step, length, 0.1, 4, 32)
        yield candidates(rows, ROW_BYTES, hits), moment, step + int(chance.integers(0, 2)), chance


def state(pool):
    """Return which rows are hot, with all that is known of them and their bytes."""
    table, rows = pool.columns, np.arange(ROWS)
    slots = pool.slots(rows)
    (hot,) = (slots >= 0).nonzero()
    own = slots[hot]
    assert (table.rows[own] == hot).all()
    assert len(set(own.tolist())) == len(hot) == (table.rows[: pool.used_rows] != NOWHERE).sum()
    columns = (table.positions, table.counts, table.last_selected, table.lengths)
    known = np.stack([column[own].astype(np.int64) for column in columns], 1)
    return hot, known, table.data[own]


@pytest.mark.parametrize("name", POLICIES)
def test_native_promotion_is_that_of_numpy(name):
    policy = POLICIES[name]
    native, twin = pool_of(HotPool, policy), pool_of(NumpyHotPool, policy)
    demoted = 0
    for offered, moment, settled, chance in steps(len(name)):
        # Some of what is hot is selected before, and stays where that is to be looked at.
        (hot, *_) = state(native)
        noted = chance.choice(hot, len(hot) // 4, replace=False)
        for pool in (native, twin):
            pool.columns.last_selected[pool.slots(noted)] = moment.step
        moved = native.promote(offered, moment, settled)
        assert moved == twin.promote(offered, moment, settled)
        demoted += moved[1]
        for one, other in zip(state(native), state(twin), strict=True):
            np.testing.assert_array_equal(one, other)
    assert demoted > 100


@pytest.mark.parametrize("name", POLICIES)
def test_a_hit_more_differs_where_hits_count(name):
    """The twin of the test before: pools that rank otherwise hold other rows."""
    policy = POLICIES[name]
    native, twin = pool_of(HotPool, policy, 100), pool_of(NumpyHotPool, policy, 100)
    differs = False
    for offered, moment, settled, _ in steps(3):
        native.promote(offered, moment, settled)
        changed = Candidates(
            offered.rows, offered.positions ^ 1, offered.counts ^ 1, offered.source, offered.places
        )
        twin.promote(changed, moment, settled)
        differs |= not np.array_equal(state(native)[1], state(twin)[1])
    assert differs


def test_policies_of_the_table_are_ranked_natively_and_others_by_python():
    assert {native_worth(one) for one in POLICIES.values()} == {0, 1, 2, 3, RANKED_BY_PYTHON}
    assert native_worth(POLICIES["of its own"]) == RANKED_BY_PYTHON
    # An instance's own worth as well, and no other method matters.
    made = make_pool_policy("lru")
    made.worth = lambda rows: rows.counts.astype(np.int64)
    assert native_worth(made) == RANKED_BY_PYTHON

    class Tallied(type(POLICIES["paper"])):
        def tally(self, counts, selected):
            counts[selected] += 2

    assert native_worth(Tallied()) == native_worth(POLICIES["paper"])


@pytest.mark.parametrize(
    ("rows", "places", "said"),
    [
        ([ROWS], [0], "nowhere"),
        ([-1], [0], "nowhere"),
        ([5], [3], "nowhere"),
        ([5], [-1], "nowhere"),
    ],
)
def test_rows_that_are_nowhere_change_nothing(rows, places, said):
    pool = pool_of(HotPool, make_pool_policy("lru"))
    pool.promote(candidates([7], ROW_BYTES), at(1), 1)
    before = state(pool)
    source = np.ones((3, ROW_BYTES), np.uint8)
    offered = Candidates(
        np.array(rows), np.array([9], np.int32), np.array([1], np.uint16), source, np.array(places)
    )
    with pytest.raises(IndexError, match=said):
        pool.promote(offered, at(2), 2)
    for one, other in zip(before, state(pool), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_of_another_size_are_refused():
    pool = pool_of(HotPool, make_pool_policy("lru"))
    with pytest.raises(ValueError, match="no rows of 64 bytes"):
        pool.promote(candidates([7], 2 * ROW_BYTES), at(1), 1)
    offered = candidates([7], 2 * ROW_BYTES)
    gaps = Candidates(
        offered.rows, offered.positions, offered.counts, offered.source[:, ::2], offered.places
    )
    with pytest.raises(ValueError, match="no rows of 64 bytes"):
        pool.promote(gaps, at(1), 1)


def test_pools_of_several_threads_are_their_own():
    """Nothing of a promotion is shared: pools of other layers are promoted to meanwhile."""
    wrong = []

    def use(seed):
        policy = make_pool_policy("paper")
        native, twin = pool_of(HotPool, policy), pool_of(NumpyHotPool, policy)
        for offered, moment, settled, _ in steps(seed, 10):
            if native.promote(offered, moment, settled) != twin.promote(offered, moment, settled):
                wrong.append(seed)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_long_contexts_are_ranked_as_short_ones():
    """Positions beyond what tells rows apart, and a length of the largest."""
    policy = make_pool_policy("paper")
    native, twin = pool_of(HotPool, policy, 8), pool_of(NumpyHotPool, policy, 8)
    positions = np.array([0, 3, FAR - 1, FAR, FAR + 5, FAR + 9, 10 * FAR, 70, 71, 72, 73, 74])
    offered = candidates(np.arange(12), ROW_BYTES, np.arange(12), positions)
    moment = PoolMoment(5000, 11 * FAR, 0.1, 4, 32)
    for pool in (native, twin):
        pool.promote(offered, moment, 5001)
    for one, other in zip(state(native), state(twin), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rows", "is_beside"), [(1000, False), (45_000, True)])
def test_many_slots_are_ranked_beside_whoever_offers_a_few_rows(rows, is_beside):
    shape = ModelShape(1, 1, 1, ROW_BYTES // 4, StoredType.FLOAT16, max_positions=100_000)
    tables = 4 * (rows + 2 * TABLE_GROWTH_ROWS)
    accountant = Accountant(tables + rows * (shape.row_bytes + SLOT_BYTES))
    policy = make_pool_policy("lru")
    pools = HotPools(shape, accountant, policy, LayerShares(1, PoolSizes.EQUAL))
    movers = []

    def promote(few, step):
        def done(moved):
            movers.append((threading.current_thread() is not threading.main_thread(), moved))

        pools.promote(0, candidates(few, shape.row_bytes), at(step), step + 1, done)
        pools.settle(0)

    try:
        pools.cover(rows + TABLE_GROWTH_ROWS)
        full = pools.capacity(0)
        promote(range(full - 5), 1)
        # Five have room, and nothing is ranked.
        promote(range(full, full + 5), 4)
        promote(range(full + 5, full + 10), 8)
        assert pools.layers[0].used_rows == full
        assert movers[1:] == [(False, (5, 0)), (is_beside, (5, 5))]
    finally:
        pools.close()
