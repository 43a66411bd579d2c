# SPDX-License-Identifier: Apache-2.0
"""Reads on demand go before reads ahead, and both bring the same rows."""

import threading
import time

import numpy as np
import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.read_turns import ReadTurns
from hillinfer.kv.cold_store import ColdStore, WantedRows
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.statistics import Counters

ENOUGH = 30
ROW_BYTES, PIECE_ROWS, LAYERS = 64, 8, 2
SHAPE = ModelShape(
    layers=LAYERS,
    kv_heads=1,
    query_heads=1,
    head_dim=ROW_BYTES // 4,
    stored_type=StoredType.FLOAT16,
    max_positions=1000,
)


def until(condition):
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Readers:
    """Threads that each take a turn and note when it began."""

    def __init__(self, turns):
        self.turns, self.order, self.threads = turns, [], []

    def start(self, name, kind):
        def take():
            if kind == self.turns.on_demand:
                kind(lambda: self.order.append(name))
                return
            with kind():
                self.order.append(name)

        self.threads.append(threading.Thread(target=take, name=name))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(ENOUGH)
            assert not thread.is_alive()


class Counted(threading.Condition):
    """Counts who waits, under its lock."""

    waiting = 0

    def wait(self, timeout=None):
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


def free(turns):
    """Say whether somebody who reads ahead gets a turn."""
    readers = Readers(turns)
    readers.start("ahead", turns.ahead)
    readers.join()
    return readers.order == ["ahead"]


def test_whoever_demands_has_the_next_turn():
    waiters = Counted()
    turns = ReadTurns(waiters)
    readers = Readers(turns)
    with turns.ahead():
        readers.start("ahead", turns.ahead)
        until(lambda: waiters.waiting == 1)
        for i in range(3):
            readers.start(f"demand {i}", turns.on_demand)
        # Who came first wakes first: without a rule it would be the one that reads ahead.
        until(lambda: waiters.waiting == 4)
        assert readers.order == []
    readers.join()
    assert readers.order[-1] == "ahead"
    assert len(readers.order) == 4


def test_between_demands_of_one_reader_nobody_reads_ahead():
    turns = ReadTurns()
    readers = Readers(turns)
    turns.demand()
    turns.on_demand(lambda: readers.start("ahead", turns.ahead))
    readers.threads[0].join(0.05)
    assert readers.order == []
    assert turns.on_demand(lambda: list(readers.order)) == []
    turns.satisfy()
    readers.join()
    assert readers.order == ["ahead"]


def test_a_turn_that_fails_ends():
    turns = ReadTurns()

    def lose():
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        turns.on_demand(lose)
    with pytest.raises(OSError, match="lost"), turns.ahead():
        lose()
    assert turns.on_demand(lambda: 7) == 7
    with turns.ahead():
        pass


class GatedStore:
    """A store whose reads ahead stop after their first piece until a read on demand waits."""

    def __init__(self, cold_dir, engine_choice):
        self.engine = open_engine(engine_choice, 2, DriveCalls())
        self.counters = Counters()
        self.store = ColdStore(
            cold_dir,
            SHAPE,
            1 << 16,
            self.engine,
            self.counters,
            ahead_bytes=PIECE_ROWS * ROW_BYTES,
        )
        self.rows = [self.write(layer) for layer in range(LAYERS)]
        self.order = []
        self.first_piece = threading.Event()
        self.go_on = threading.Event()
        read_now = self.store._read_now

        def noted(wanted):
            self.order.append((wanted.layer, len(wanted.rows)))
            if wanted.layer == 1:
                self.first_piece.set()
                assert self.go_on.wait(ENOUGH)
            return read_now(wanted)

        self.store._read_now = noted

    def write(self, layer):
        data = aligned_buffer(64 * ROW_BYTES)[: 64 * ROW_BYTES]
        data[:] = np.random.default_rng(layer).integers(0, 256, len(data), np.uint8)
        rows = data.reshape(64, ROW_BYTES)
        self.store.write_groups(layer, np.arange(1), rows, lambda: None)
        return rows

    def close(self):
        self.store.close()
        self.engine.close()


@pytest.fixture
def gated(cold_dir, engine_choice):
    made = GatedStore(cold_dir, engine_choice)
    yield made
    made.close()


def read_both(gated, ahead):
    """Read all of layer 1 with `ahead`, and layer 0 on demand once that has begun."""
    out = [np.zeros((64, ROW_BYTES), np.uint8) for _ in range(LAYERS)]
    given = np.arange(64)
    wanted = [WantedRows(layer, given, out[layer], given) for layer in range(LAYERS)]
    first = threading.Thread(target=ahead, args=(wanted[1],))
    first.start()
    assert gated.first_piece.wait(ENOUGH)
    second = threading.Thread(target=gated.store.read_rows, args=(wanted[0],))
    second.start()
    until(lambda: gated.store._turns._demanded == 1)
    gated.go_on.set()
    for thread in (first, second):
        thread.join(ENOUGH)
        assert not thread.is_alive()
    return out


def test_rows_on_demand_come_between_pieces_of_rows_ahead(gated):
    out = read_both(gated, lambda wanted: list(gated.store.read_rows_ahead(wanted)))
    assert gated.order == [(1, PIECE_ROWS), (0, 64), *[(1, PIECE_ROWS)] * 7]
    for got, expected in zip(out, gated.rows, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert gated.counters.cold_useful_bytes == 2 * 64 * ROW_BYTES


def test_without_pieces_they_wait_for_the_last_row(gated):
    """What the order of the test before is compared with."""
    read_both(gated, gated.store.read_rows)
    assert gated.order == [(1, 64), (0, 64)]


def test_nothing_ahead_reads_nothing(gated):
    none = np.arange(0)
    wanted = WantedRows(1, none, np.zeros((0, ROW_BYTES), np.uint8), none)
    assert list(gated.store.read_rows_ahead(wanted)) == []
    assert gated.order == []


class Interrupted(Counted):
    """Ctrl-C comes while the main thread waits, once its wait is over."""

    def wait_for(self, predicate, timeout=None):
        found = super().wait_for(predicate, timeout)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return found


def test_an_interrupt_while_waiting_leaves_the_turn_to_others():
    waiters = Interrupted()
    turns = ReadTurns(waiters)
    readers = Readers(turns)
    begun, over = threading.Event(), threading.Event()

    def first_ahead():
        with turns.ahead():
            begun.set()
            until(lambda: waiters.waiting == 1)
            readers.start("second ahead", turns.ahead)
        over.set()

    holder = threading.Thread(target=first_ahead)
    holder.start()
    assert begun.wait(ENOUGH)
    with pytest.raises(KeyboardInterrupt):
        turns.on_demand(lambda: None)
    assert over.wait(ENOUGH)
    holder.join()
    readers.join()
    assert readers.order == ["second ahead"]
    assert free(turns)


class OnceInterrupted(threading.Condition):
    """Ctrl-C comes once, when the lock is given back: what was noted under it is noted."""

    armed = True

    def __exit__(self, *given):
        super().__exit__(*given)
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["demand", "on_demand"])
def test_an_interrupt_right_after_a_note_takes_it_back(kind):
    turns = ReadTurns(OnceInterrupted())
    given = () if kind == "demand" else (lambda: None,)
    with pytest.raises(KeyboardInterrupt):
        getattr(turns, kind)(*given)
    assert free(turns)
