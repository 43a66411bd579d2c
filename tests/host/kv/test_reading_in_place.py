# SPDX-License-Identifier: Apache-2.0
"""Runs of rows that attention reads in place, and what sequences learn meanwhile."""

import numpy as np
import pytest
from runtime_rows import SETTINGS, SHAPE, fill, read

from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.kv.gather import tile_runs


def run_by_run(count, rest, tile, most):
    """Cut as `tile_runs` should, a tile after the other."""
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
            runs = [(a, b, own.tolist()) for a, b, own in tile_runs(count, rest, 8, most)]
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
        runtime.parts.pools.promotions.settle_all()
        fork = runtime.fork(sequence)
        for _ in range(3):
            read(runtime, 0, sequence, np.arange(90, 100))
        hits = sequence.hits.counts[0][:128].copy()
        pool = runtime.parts.pools.layers[0]
        slots = pool.slots(fork.rows(np.arange(128)))
        assert (slots >= 0).all()
        known = pool.columns.counts
        assert (known[slots] != hits).any(), "nothing was left to be told"
        ends(runtime, sequence)
        np.testing.assert_array_equal(known[slots], hits)
    finally:
        runtime.close()


def test_rounds_are_those_of_open_sequences(cold_dir):
    runtime = Runtime(SHAPE, SETTINGS, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir)
    try:
        sequences = [runtime.open_sequence() for _ in range(3)]
        for sequence in sequences:
            fill(runtime, sequence, 200)
        rows = np.arange(60)
        for number in (0, 1, 2, 1, 2, 1):
            read(runtime, 0, sequences[number], rows)
        runtime.release(sequences[2])
        # Two rounds of two others, and then four of one.
        for _ in range(4):
            read(runtime, 0, sequences[1], rows)
        pools = runtime.parts.pools
        pools.promotions.settle_all()
        pools.hits.tell(0)
        wanted = sequences[0].hits.counts[0][:60].copy()
        for _ in range(2):
            wanted -= wanted >> 2
        slots = pools.layers[0].slots(sequences[0].rows(rows))
        assert (slots >= 0).all()
        np.testing.assert_array_equal(pools.layers[0].columns.counts[slots], wanted)
    finally:
        runtime.close()
