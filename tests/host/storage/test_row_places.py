# SPDX-License-Identifier: Apache-2.0
"""Where rows lie that attention reads in place."""

import numpy as np
import pytest
from runtime_rows import SETTINGS, SHAPE, fill, read

from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.pools.budget_plan import staging_bytes
from hillinfer.pools.hot_pool import HotPool
from hillinfer.runtime import Runtime
from hillinfer.storage.row_reader import _runs
from hillinfer.storage.sequence import Sequence


def test_slots_have_addresses_and_no_slot_has_none():
    pool = HotPool(64, 10, PoolPolicy())
    data = pool._slots.data
    slots = np.array([3, -1, 0, 9], np.int32)
    expected = [data[3:].ctypes.data, 0, data.ctypes.data, data[9:].ctypes.data]
    assert pool.addresses(slots).tolist() == expected
    # The twin: one slot further is another address.
    assert pool.addresses(slots + np.int32(1)).tolist() != expected


def test_a_hit_of_no_slot_stamps_none():
    pool = HotPool(64, 10, PoolPolicy())
    pool.note_hits(np.array([2, -1, 5], np.int32), 7)
    assert np.flatnonzero(pool._slots.last_selected).tolist() == [2, 5]


def test_the_tail_has_addresses_of_what_it_holds_alone():
    sequence = Sequence(2, 64)
    sequence.lengths, sequence.held_starts = [70, 130], [64, 128]
    tails = sequence.tails
    places = sequence.tail_addresses(1, np.array([128, 129]))
    assert places.tolist() == [tails[1, 0].ctypes.data, tails[1, 1].ctypes.data]
    assert sequence.tail_addresses(0, np.array([65])).tolist() == [tails[0, 1].ctypes.data]
    assert sequence.tail_addresses(0, np.zeros(0, np.int64)).tolist() == []
    for positions in ([63, 64], [69, 70], [127]):
        with pytest.raises(IndexError):
            sequence.tail_addresses(0, np.array(positions))


def run_by_run(count, rest, tile, most):
    """Cut as `_runs` should, a tile after the other."""
    runs, start, own = [], 0, []
    for first in range(0, count, tile):
        stop = min(first + tile, count)
        more = [one for one in rest if first <= one < stop]
        if len(own) + len(more) > most:
            runs.append((start, first, own))
            start, own = first, []
        own = own + more
    return [*runs, (start, count, own)] if count else runs


@pytest.mark.parametrize("most", [8, 20, 1000])
def test_runs_want_no_more_than_a_buffer_holds(most):
    random = np.random.default_rng(1)
    for count in (0, 1, 8, 9, 200):
        for share in (0.0, 0.3, 1.0):
            rest = np.flatnonzero(random.random(count) < share)
            runs = [(a, b, own.tolist()) for a, b, own in _runs(count, rest, 8, most)]
            assert runs == run_by_run(count, rest.tolist(), 8, most)
            # The twin: a buffer of other size cuts otherwise, where it is filled at all.
            if len(rest) > most:
                assert runs != run_by_run(count, rest.tolist(), 8, most + 8)


@pytest.mark.parametrize("ends", [Runtime.release, lambda *it: Runtime.truncate(*it, 64)])
def test_what_a_sequence_learnt_outlives_its_rows(cold_dir, ends):
    """A fork ranks shared rows by the hits of whoever went on last, also when that one went."""
    runtime = Runtime(SHAPE, SETTINGS, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir)
    try:
        sequence = runtime.open_sequence()
        fill(runtime, sequence, 200)
        read(runtime, 0, sequence, np.arange(100))
        runtime._pools.settle_all()
        fork = runtime.fork(sequence)
        for _ in range(3):
            read(runtime, 0, sequence, np.arange(90, 100))
        hits = sequence.hits.counts[0][:128].copy()
        pool = runtime._pools.layers[0]
        slots = pool.slots(fork.rows(np.arange(128)))
        assert (slots >= 0).all()
        known = pool._slots.counts
        assert (known[slots] != hits).any(), "nothing was left to be told"
        ends(runtime, sequence)
        np.testing.assert_array_equal(known[slots], hits)
    finally:
        runtime.close()
