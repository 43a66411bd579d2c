# SPDX-License-Identifier: Apache-2.0
"""Where rows lie that attention reads in place."""

import numpy as np
import pytest
from pool_cases import at, candidates
from twins.numpy_hot_pool import NumpyHotPool

from hillinfer.kv.hot_pool import HotPool
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.sequence import Sequence


@pytest.fixture(params=["numpy", "native"])
def make_pool(request):
    """Return a function that makes a pool of 70 slots for rows below 1,000."""
    kind = HotPool if request.param == "native" else NumpyHotPool

    def make():
        pool = kind(64, 70, PoolPolicy())
        pool.cover(200)
        pool.cover(1000)
        return pool

    return make


def scene(pool, length, held, seed):
    """Make some rows of a sequence of groups in disorder hot, and return the sequence."""
    random = np.random.default_rng(seed)
    sequence = Sequence(2, 64)
    sequence.append_groups(random.permutation(15)[: length // 64].tolist())
    sequence.set_length(1, length, held)
    hot = random.permutation(sequence.rows(np.arange(held)))[:60]
    pool.grow(70)
    pool.promote(candidates(hot.tolist(), 64), at(1, length), 1)
    return sequence


def place_by_place(pool, sequence, positions):
    places = []
    for position in positions:
        if position >= sequence.held_starts[1]:
            places.append(sequence.tails[1, position - sequence.held_starts[1] :].ctypes.data)
            continue
        row = sequence.groups[position // 64] * 64 + position % 64
        slot = int(pool.slots(np.array([row]))[0])
        places.append(pool.columns.data[slot:].ctypes.data if slot >= 0 else 0)
    return places


@pytest.mark.parametrize(("length", "held"), [(900, 896), (896, 832), (64, 64), (3, 0)])
def test_rows_are_where_pool_and_tail_have_them(make_pool, length, held):
    pool = make_pool()
    sequence = scene(pool, length, held, seed=length)
    if length % 64 == 0 and held == length:
        sequence.set_length(1, length + 1, held)
    random = np.random.default_rng(0)
    for step in (5, 6):
        positions = np.flatnonzero(random.random(sequence.lengths[1]) < 0.4)
        found = pool.locate(1, sequence, positions, step)
        assert found.dtype == np.uint64
        assert found.tolist() == place_by_place(pool, sequence, positions.tolist())
        slots = pool.slots(sequence.rows(positions[positions < held]))
        stamps = pool.columns.last_selected
        np.testing.assert_array_equal(
            np.flatnonzero(stamps == step), np.sort(slots[slots >= 0]), "stamps of others"
        )
    assert pool.locate(1, sequence, np.zeros(0, np.int64), 8).tolist() == []


def test_the_two_ways_to_find_rows_agree_and_see_a_row_that_moved():
    pools = [kind(64, 70, PoolPolicy()) for kind in (NumpyHotPool, HotPool)]
    offsets = []
    for pool in pools:
        pool.cover(1000)
        sequence = scene(pool, 900, 896, seed=4)
        found = pool.locate(1, sequence, np.arange(896), 2).astype(np.int64)
        offsets.append(np.where(found, found - pool.columns.data.ctypes.data, -1))
    np.testing.assert_array_equal(*offsets)
    assert (offsets[0] >= 0).sum() == 60
    # The twin: one slot that changes place must show.
    row = int(sequence.rows(np.array([int(np.argmax(offsets[0] >= 0))]))[0])
    pools[1].slot_of_row[row] ^= 1
    found = pools[1].locate(1, sequence, np.arange(896), 2).astype(np.int64)
    assert (np.where(found, found - pools[1].columns.data.ctypes.data, -1) != offsets[0]).any()


@pytest.mark.parametrize("positions", [[-1], [899, 900], [5, 2000]])
def test_positions_that_do_not_exist_are_refused(make_pool, positions):
    pool = make_pool()
    sequence = scene(pool, 900, 896, seed=1)
    with pytest.raises(IndexError):
        pool.locate(1, sequence, np.array(positions), 2)


def test_groups_that_are_not_there_are_refused(make_pool):
    pool = make_pool()
    sequence = scene(pool, 900, 896, seed=1)
    sequence.truncate(192)
    sequence.set_length(1, 900, 896)
    assert (pool.locate(1, sequence, np.array([191]), 2) >= 0).all()
    with pytest.raises(IndexError):
        pool.locate(1, sequence, np.array([192]), 2)
