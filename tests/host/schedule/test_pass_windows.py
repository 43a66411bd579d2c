# SPDX-License-Identifier: Apache-2.0
"""Writes that nobody waits for go where a pass leaves time, and nowhere else."""

import threading

import numpy as np
import pytest
import torch

from hillinfer.drive.read_turns import IOClass, Patience, ReadTurns
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.windows import PassWindows, SlackTable

MIB = 1 << 20
ROW = 1024
ENOUGH = 30


class Clock:
    """Goes on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def windows_of(read_rate, clock, mixing_loss=0.0, patience=1000.0):
    turns = ReadTurns(patience=Patience(patience, patience), clock=clock)
    table = SlackTable.measured(lambda new, before: 0.010)
    rates = DriveRates((MIB,), (read_rate,), 1e9, mixing_loss)
    return PassWindows(table, turns, ROW, rates, clock=clock), turns


def test_a_window_is_open_as_long_as_a_write_ends_in_it():
    clock = Clock()
    windows, _ = windows_of(1e9, clock)
    assert windows.is_open(MIB)
    windows.come(0, 64, 8064)
    windows.go(0, 64, 8064, 0)
    assert windows.is_open(MIB)
    clock.now = 0.0095
    assert not windows.is_open(MIB)
    windows.come(1, 64, 8064)
    # Reads on demand have turns of their own; between them nobody knows of a window.
    assert windows.is_open(MIB)
    windows.go(1, 64, 8064, 0)
    clock.now = 0.0190
    assert not windows.is_open(MIB)
    windows.end()
    assert windows.is_open(MIB)


def test_where_reading_ahead_takes_the_window_nothing_is_written_until_the_last_read():
    clock = Clock()
    windows, _ = windows_of(0.1e9, clock)
    rows = 2 * MIB // ROW
    for layer in range(3):
        windows.come(layer, 64, 8064)
        windows.go(layer, 64, 8064, rows)
        assert not windows.is_open(MIB)
    windows.come(3, 64, 8064)
    windows.end()
    assert windows.is_open(MIB)
    assert windows.counts()["slack_seconds"] == 0


def test_what_mixing_loses_makes_windows_shorter():
    for loss, is_open in ((0.0, True), (0.95, False)):
        windows, _ = windows_of(1e9, Clock(), loss)
        windows.go(0, 64, 8064, 0)
        assert windows.is_open(MIB) is is_open


def test_what_passes_take_is_learned_but_not_what_lies_between_two_of_them():
    clock = Clock()
    windows, _ = windows_of(1e9, clock)
    before = windows.table.window(64, 8064)
    windows.go(0, 64, 8064, 0)
    clock.now = 0.05
    windows.come(1, 64, 8064)
    learned = windows.table.window(64, 8064)
    assert learned > before
    windows.go(1, 64, 8064, 0)
    clock.now = 5.0
    # Another pass begins.
    windows.come(0, 64, 8064)
    assert windows.table.window(64, 8064) == learned
    assert windows.counts()["windows"] == 1


def write(turns, done):
    def run():
        with turns.writing(MIB):
            done.append(turns.waiting(IOClass.SLACK))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["time", "hurry"])
def test_a_write_that_finds_no_window_never_waits_for_ever(how):
    clock = Clock()
    windows, turns = windows_of(0.001e9, clock, patience=1.0)
    windows.go(0, 64, 8064, 100)
    done = []
    thread = write(turns, done)
    thread.join(0.05)
    assert not done
    if how == "time":
        clock.now = 1.5
        thread.join(ENOUGH)
    else:
        turns.hurry(lambda: thread.join(ENOUGH))
    assert done == [0]
    counts = windows.counts()
    assert (counts["deferred_writes"], counts["spilled_bytes"]) == (1, MIB)
    assert counts["slack_bytes"] == 0


def test_the_cold_pool_writes_in_slack_and_brings_the_same_rows(cold_dir):
    """What is put off is there when it is wanted."""
    from hillinfer.drive.calls import DriveCalls
    from hillinfer.drive.engine_table import open_engine
    from hillinfer.drive.files import aligned_buffer
    from hillinfer.drive.landing import WantedRows
    from hillinfer.kv.cold_store import ColdStore
    from hillinfer.model_shape import ModelShape, StoredType
    from hillinfer.settings import IOChoice
    from hillinfer.statistics import Counters

    shape = ModelShape(
        layers=1,
        kv_heads=1,
        query_heads=1,
        head_dim=16,
        stored_type=StoredType.FLOAT16,
        max_positions=1000,
    )
    engine = open_engine(IOChoice.THREADS, 2, DriveCalls())
    store = ColdStore(cold_dir, shape, 1 << 16, engine, Counters())
    try:
        rows = aligned_buffer(64 * 64)[: 64 * 64].reshape(64, 64)
        rows[:] = torch.randint(0, 256, (64, 64), dtype=torch.uint8).numpy()
        store.turns.demand()
        store.write_groups(0, np.arange(1), rows, lambda: None)
        out, every = np.zeros((64, 64), np.uint8), np.arange(64)
        # Between the reads of one who demands nothing is written, but what it wants itself is.
        store.read_rows(WantedRows(0, every, out, every))
        np.testing.assert_array_equal(out, rows)
        # The twin.
        out[3, 5] ^= 1
        assert not np.array_equal(out, rows)
        store.turns.satisfy()
        assert store.turns.counts()["spilled_bytes"] == rows.nbytes
        store.write_groups(0, np.arange(1, 2), rows, lambda: None)
        store.turns.hurry(lambda: None)
    finally:
        store.close()
        engine.close()
