# SPDX-License-Identifier: Apache-2.0
"""Reads on demand go before reads ahead, and both bring the same rows."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.landing import WantedRows
from hillinfer.drive.read_turns import Apart, Beside, IOClass, Patience, ReadTurns
from hillinfer.kv.cold_store import ColdStore
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


class Line:
    """Transfers that wait while somebody has the drive, and the order in which they get it."""

    def __init__(self, **given):
        self.waiters = Counted()
        self.turns = ReadTurns(self.waiters, **given)
        self.order, self.threads = [], []

    def add(self, name, take):
        def run():
            with take():
                self.order.append(name)

        self.threads.append(threading.Thread(target=run, name=name, daemon=True))
        self.threads[-1].start()

    def demand(self, name):
        run = partial(self.turns.on_demand, lambda: self.order.append(name))
        self.threads.append(threading.Thread(target=run, name=name, daemon=True))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(ENOUGH)
            assert not thread.is_alive()

    def wait_for(self, count):
        until(lambda: sum(self.turns.waiting(kind) for kind in IOClass) == count)


def test_four_classes_and_deadlines_order_those_who_wait():
    line = Line(patience=Patience(1000, 1000))
    with line.turns.ahead():
        line.add("slack", partial(line.turns.writing, 1))
        line.wait_for(1)
        for place, deadline in enumerate((3.0, 1.0, 2.0)):
            line.add(f"ahead {deadline}", partial(line.turns.ahead, deadline))
            line.wait_for(place + 2)
        line.add("spill", partial(line.turns.writing, 1, IOClass.SPILL))
        line.wait_for(5)
        line.demand("demand")
        line.wait_for(6)
        assert line.order == []
    line.join()
    assert line.order == ["demand", "spill", "ahead 1.0", "ahead 2.0", "ahead 3.0", "slack"]
    counts = line.turns.counts()
    assert (counts["deferred_writes"], counts["slack_bytes"], counts["spilled_bytes"]) == (2, 1, 1)


def test_a_writer_never_starves():
    """Readers who never leave a gap get the drive first, until a write has waited long enough."""
    now = [0.0]
    line = Line(patience=Patience(1.0, 0.5), clock=lambda: now[0])

    line.turns.demand()
    line.add("write", partial(line.turns.writing, 1))
    line.wait_for(1)
    line.threads[0].join(0.05)
    assert "write" not in line.order
    # A spill by now: between one reader's demands it may go, before whoever reads ahead.
    now[0] = 1.1
    line.threads[0].join(ENOUGH)
    assert line.order == ["write"]
    line.turns.satisfy()


def test_a_spill_that_waited_goes_before_later_demands():
    now = [0.0]
    line = Line(patience=Patience(1.0, 0.5), clock=lambda: now[0])
    with line.turns.ahead():
        line.add("spill", partial(line.turns.writing, 1, IOClass.SPILL))
        line.wait_for(1)
        line.demand("early")
        line.wait_for(2)
        now[0] = 0.6
        line.demand("late")
        line.wait_for(3)
    line.join()
    assert line.order[0] == "spill"
    # The twin: one that has not waited does not.
    line = Line(patience=Patience(1.0, 0.5), clock=lambda: now[0])
    with line.turns.ahead():
        line.add("spill", partial(line.turns.writing, 1, IOClass.SPILL))
        line.wait_for(1)
        line.demand("late")
        line.wait_for(2)
    line.join()
    assert line.order == ["late", "spill"]


@pytest.mark.parametrize(("mixing", "beside"), [(Apart(), False), (Beside(), True)])
def test_a_write_goes_beside_reads_where_the_drive_loses_nothing(mixing, beside):
    line = Line(mixing=mixing, patience=Patience(1000, 1000))
    with line.turns.ahead():
        line.add("write", partial(line.turns.writing, 1))
        if beside:
            line.join()
        else:
            line.wait_for(1)
        assert line.order == (["write"] if beside else [])
    line.join()


def test_several_readers_have_turns_at_once_and_a_write_none_beside_them():
    line = Line(mixing=Apart(2), patience=Patience(1000, 1000))
    with line.turns.ahead(), line.turns.ahead():
        line.add("third", line.turns.ahead)
        line.add("write", partial(line.turns.writing, 1))
        line.wait_for(2)
    line.join()
    assert line.order == ["third", "write"]


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


def test_demands_hold_what_takes_no_turns():
    told, turns = [], ReadTurns()
    turns.without_turns.append(
        SimpleNamespace(hold=lambda: told.append(1), go_on=lambda: told.append(0))
    )
    turns.demand()
    turns.demand()
    turns.satisfy()
    turns.satisfy()
    assert told == [1, 1, 1, 0]


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
        land, files = self.engine.land, []
        self.order = []
        self.first_piece = threading.Event()
        self.go_on = threading.Event()

        def noted(file, wanted):
            # Layer 1 is asked for first.
            if file not in files:
                files.append(file)
            self.order.append((LAYERS - 1 - files.index(file), len(wanted.rows)))
            if file is files[0]:
                self.first_piece.set()
                assert self.go_on.wait(ENOUGH)
            return land(file, wanted)

        self.engine.land = noted
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
    until(lambda: gated.store.turns.waiting(IOClass.DEMAND) == 1)
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
