# SPDX-License-Identifier: Apache-2.0
"""Sets of rows that stand in line are read together, and each gets its own."""

import os
import threading
import time

import numpy as np
import pytest
from drive_fixtures import in_the_place_of
from interrupts import interrupted
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowSums
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.landing import BlockState, LandingArea
from hillinfer.errors import ColdPoolError
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.prefetch_buffer import LandingThread, PrefetchBuffer
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import IOChoice
from hillinfer.statistics import Counters

ROW_BYTES, ROWS, LAYERS = 128, 1024, 2
SHAPE = ModelShape(LAYERS, 1, 1, 32, StoredType.BFLOAT16, ROWS)
ENOUGH = 60


class Held(DriveCalls):
    """A drive that notes how many rows land at once, and waits while it is held."""

    def __init__(self):
        self.landed, self.go_on = [], threading.Event()
        self.go_on.set()

    def land(self, way, landing):
        self.landed.append(landing.count)
        assert self.go_on.wait(ENOUGH)
        return super().land(way, landing)


class Struck(ColdStore):
    """A store in which Ctrl-C comes once, where a test says."""

    at = None

    def strike(self, place):
        if self.at == place:
            self.at = None
            raise KeyboardInterrupt

    def landed_ahead(self, wanted, ahead):
        cost = super().landed_ahead(wanted, ahead)
        self.strike("rows came")
        return cost

    def ahead(self, lander, wanted):
        ahead = super().ahead(lander, wanted)
        if ahead is None:
            return None
        begin = ahead.begin

        def struck():
            self.strike("before they begin")
            begin()
            self.strike("after they began")

        ahead.begin = struck
        return ahead


class Line:
    """A prefetch buffer over a store of two layers, on a drive that can be held."""

    def __init__(self, folder, blocks=64, ahead_bytes=1 << 20, calls=None):
        self.calls = calls or Held()
        self.engine = open_engine(IOChoice.THREADS, 2, self.calls)
        sums = RowSums(LAYERS, Accountant(1 << 30))
        self.counters = Counters()
        self.store = Struck(
            folder, SHAPE, 1 << 16, self.engine, self.counters, sums=sums, ahead_bytes=ahead_bytes
        )
        self.store.cover(ROWS // 64)
        self.rows = []
        for layer in range(LAYERS):
            memory = aligned_buffer(ROWS * ROW_BYTES)
            memory[:] = np.random.default_rng(layer).integers(0, 256, len(memory), np.uint8)
            self.rows.append(memory.reshape(ROWS, ROW_BYTES))
            groups = np.arange(ROWS // 64)
            self.store.write_groups(layer, groups, self.rows[layer], lambda: None)
            self.store.settle_all(layer)
        self.buffer = PrefetchBuffer(self.store, LandingArea(blocks, 8, ROW_BYTES))

    def begin(self, layer, rows):
        rows = np.asarray(rows, np.int64)
        return self.buffer.begin(layer, np.arange(len(rows)) * 3, rows)

    def assert_landed(self, landed, layer, rows):
        cost = landed.reading.result(ENOUGH)
        assert landed.positions.tolist() == (np.arange(len(rows)) * 3).tolist()
        np.testing.assert_array_equal(self.buffer.rows[landed.places], self.rows[layer][rows])
        return cost

    def give_back(self, *every):
        for landed in every:
            self.buffer.claim(landed)
            self.buffer.let_go(landed)

    def change(self, layer, row):
        """Change a bit of a row on the drive, as nobody here does."""
        descriptor = os.open(f"/proc/self/fd/{self.store.files[layer].descriptor}", os.O_RDWR)
        offset = row * ROW_BYTES + 5
        os.pwrite(descriptor, bytes([self.rows[layer][row, 5] ^ 1]), offset)
        os.fsync(descriptor)
        os.close(descriptor)

    def close(self):
        if isinstance(self.calls, Held):
            self.calls.go_on.set()
        self.buffer.close()
        self.store.close()
        self.engine.close()


@pytest.fixture
def line(tmp_path):
    made = Line(tmp_path)
    yield made
    made.close()


def in_line(line, sets):
    """Begin sets of layer and rows, the first of which the drive holds until all stand in line."""
    line.calls.landed.clear()
    line.calls.go_on.clear()
    landed = [line.begin(*sets[0])]
    until(lambda: line.calls.landed)
    landed += [line.begin(*one) for one in sets[1:]]
    line.calls.go_on.set()
    return landed


FIRST = (0, [3, 700, 90])
SETS = [FIRST, (0, [5, 6, 200]), (0, [1000, 7]), (0, [6, 5, 300, 301]), (1, [5, 6]), (0, [8])]


def test_sets_of_a_layer_that_stand_in_line_are_read_as_one(line):
    landed = in_line(line, SETS)
    costs = [line.assert_landed(one, *own) for one, own in zip(landed, SETS, strict=True)]
    # Rows that two of them want come once for each.
    assert line.calls.landed == [3, 9, 2, 1]
    # What several are read by is told once.
    assert sum(cost.reads for cost in costs) == line.counters.cold_reads
    assert sum(cost.byte_count for cost in costs) == line.counters.cold_read_bytes
    assert [cost.reads > 0 for cost in costs] == [True, True, False, False, True, True]
    line.give_back(*landed)
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


def test_sets_that_begin_together_are_read_as_one(line):
    landed = []
    line.calls.landed.clear()
    line.buffer.together(lambda: landed.extend(line.begin(*one) for one in SETS))
    for one, own in zip(landed, SETS, strict=True):
        line.assert_landed(one, *own)
    assert line.calls.landed == [12, 2, 1]
    line.give_back(*landed)


def test_an_error_in_the_middle_of_sets_that_begin_together_holds_nothing_up(line):
    landed = []

    def begin():
        landed.append(line.begin(*FIRST))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        line.buffer.together(begin)
    line.assert_landed(landed[0], *FIRST)
    line.buffer.abandon_unclaimed()
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


def test_a_set_that_began_alone_is_read_alone(line):
    """What the order of the test before is compared with."""
    line.calls.landed.clear()
    for own in SETS:
        landed = line.begin(*own)
        line.assert_landed(landed, *own)
        line.give_back(landed)
    assert line.calls.landed == [3, 3, 2, 4, 2, 1]


def test_a_row_of_another_set_is_seen(line):
    landed = in_line(line, SETS)
    with pytest.raises(AssertionError):
        line.assert_landed(landed[1], 0, [5, 6, 201])
    line.give_back(*landed)


def test_a_set_is_there_before_those_behind_it(tmp_path):
    line = Line(tmp_path, ahead_bytes=4 * ROW_BYTES)
    landed = in_line(line, [FIRST, (0, [10, 20]), (0, list(range(100, 140)))])
    first = line.assert_landed(landed[1], 0, [10, 20])
    line.assert_landed(landed[2], 0, list(range(100, 140)))
    # Pieces of four rows: the first two sets behind the one that was alone share one.
    assert line.calls.landed == [3, *[4] * 10, 2]
    assert first.reads > 0
    line.give_back(*landed)
    line.close()


def test_an_error_is_told_to_whom_it_concerns(line):
    line.change(0, 1000)
    landed = in_line(line, SETS)
    for number, own in enumerate(SETS):
        if number == 2:
            with pytest.raises(ColdPoolError, match=r"rows of layer 0 .*not what was written"):
                landed[number].reading.result(ENOUGH)
        else:
            line.assert_landed(landed[number], *own)
    line.give_back(*landed)
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


def test_a_drive_that_fails_is_told_to_all(line):
    with in_the_place_of(line.store.files[0], "/", os.O_RDONLY):
        landed = in_line(line, SETS[:4])
        for one in landed:
            with pytest.raises(ColdPoolError, match="Is a directory"):
                one.reading.result(ENOUGH)
    line.give_back(*landed)
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


@pytest.mark.parametrize("which", [1, 2, 3])
def test_who_is_wanted_does_not_wait_for_room(tmp_path, which):
    """Blocks of eight rows, two of them: sets of ten rows find no room together."""
    line = Line(tmp_path, blocks=2)
    sets = [(0, list(range(start, start + 10))) for start in (0, 100, 200, 300)]
    landed = in_line(line, sets)
    line.assert_landed(landed[0], *sets[0])
    line.buffer.want(landed[which])
    for one in landed[1 : which + 1]:
        assert one.reading.result(ENOUGH).reads == 0
        assert not len(one.positions)
    # Those behind wait until there is room.
    assert not any(one.reading.done() for one in landed[which + 1 :])
    line.give_back(landed[0])
    for number in range(which + 1, 4):
        line.assert_landed(landed[number], *sets[number])
        line.give_back(landed[number])
    line.give_back(*landed[1 : which + 1])
    line.close()


def test_closing_ends_what_stands_in_line(tmp_path):
    line = Line(tmp_path, blocks=2)
    landed = in_line(line, [(0, list(range(10))), (0, [50, 51]), (1, [9])])
    line.assert_landed(landed[0], 0, list(range(10)))
    line.close()
    for one in landed[1:]:
        assert one.reading.result(ENOUGH).reads == 0
        assert not len(one.positions)


def test_what_is_dropped_in_line_is_not_read(line):
    line.calls.go_on.clear()
    line.calls.landed.clear()
    first = line.begin(*FIRST)
    until(lambda: line.calls.landed)
    line.begin(0, [5])
    line.begin(1, [6])
    threading.Timer(0.05, line.calls.go_on.set).start()
    line.buffer.abandon_unclaimed()
    assert first.reading.done()
    assert line.calls.landed == [3]
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


def test_what_an_interrupt_left_in_line_takes_nobodys_turn(line):
    """It stands there, and nobody was told: the next one, of another layer, is read."""
    with interrupted(LandingThread.submit, "call"), pytest.raises(KeyboardInterrupt):
        line.begin(*FIRST)
    line.buffer.abandon_unclaimed()
    second = line.begin(1, [5, 6])
    line.assert_landed(second, 1, [5, 6])
    line.give_back(second)
    assert set(line.buffer.landing.states()) == {BlockState.FREE}


# --- by the library's own thread ----------------------------------------------------------


@pytest.fixture
def free(tmp_path):
    """Nobody looks at reads, so that a thread of the library's makes them."""
    made = Line(tmp_path, calls=DriveCalls())
    yield made
    made.close()


def python_threads():
    return [one for one in threading.enumerate() if one.name.startswith("hillinfer-land")]


def arrived(line, landed):
    line.buffer.claim(landed)
    return line.buffer.arrive(landed)


def test_the_librarys_thread_brings_what_pythons_does(free, tmp_path):
    landed = [free.begin(*one) for one in SETS]
    costs = [arrived(free, one) for one in reversed(landed)][::-1]
    assert not python_threads()
    for one, own in zip(landed, SETS, strict=True):
        free.assert_landed(one, *own)
    assert sum(cost.reads for cost in costs) == free.counters.cold_reads > 0
    assert sum(cost.byte_count for cost in costs) == free.counters.cold_read_bytes
    assert free.counters.cold_useful_bytes == sum(len(rows) for _, rows in SETS) * ROW_BYTES
    for one in landed:
        free.buffer.let_go(one)
    assert set(free.buffer.landing.states()) == {BlockState.FREE}
    # The twin: somebody who looks at reads sees these.
    seen = Line(tmp_path)
    again = seen.begin(*SETS[0])
    assert arrived(seen, again) == costs[0]
    assert python_threads()
    seen.buffer.let_go(again)
    seen.close()


def test_what_somebody_demands_goes_first(free):
    """A set begun between the reads of one who demands stands still until that has its rows."""
    free.store.turns.demand()
    landed = free.begin(*FIRST)
    wanted = free.rows[0][FIRST[1]]
    time.sleep(0.05)
    assert not np.array_equal(free.buffer.rows[landed.places], wanted)
    free.store.turns.satisfy()
    until(lambda: np.array_equal(free.buffer.rows[landed.places], wanted))
    free.give_back(landed)


def test_what_went_wrong_is_told_where_it_is_wanted(free):
    free.change(0, 700)
    landed = [free.begin(*one) for one in SETS[:2]]
    with pytest.raises(ColdPoolError, match=r"rows of layer 0 .*not what was written"):
        arrived(free, landed[0])
    free.buffer.let_go(landed[0])
    arrived(free, landed[1])
    free.assert_landed(landed[1], *SETS[1])
    free.buffer.let_go(landed[1])
    assert set(free.buffer.landing.states()) == {BlockState.FREE}


def test_what_nobody_wants_any_more_gives_its_blocks_back(free):
    landed = [free.begin(*one) for one in SETS]
    free.buffer.abandon_unclaimed()
    assert not free.buffer.unclaimed
    assert all(one.fault() is None for one in landed)
    assert set(free.buffer.landing.states()) == {BlockState.FREE}


def test_what_finds_no_room_goes_another_way(tmp_path):
    """Two blocks of eight rows: a set of ten takes both, and the next ones stand in line."""
    line = Line(tmp_path, blocks=2, calls=DriveCalls())
    sets = [(0, list(range(start, start + 10))) for start in (0, 100)]
    landed = [line.begin(*one) for one in sets]
    assert landed[0].ahead is not None
    assert landed[1].ahead is None
    arrived(line, landed[0])
    line.assert_landed(landed[0], *sets[0])
    line.buffer.let_go(landed[0])
    line.assert_landed(landed[1], *sets[1])
    # Behind one that stands in line nothing goes first.
    third = line.begin(1, [3, 4])
    line.buffer.want(third)
    line.give_back(landed[1], third)
    line.close()


def test_an_interrupt_while_rows_come_loses_no_block(free):
    landed = free.begin(*FIRST)
    free.store.at = "rows came"
    with pytest.raises(KeyboardInterrupt):
        arrived(free, landed)
    free.buffer.let_go(landed)
    assert landed.fault() is None
    assert set(free.buffer.landing.states()) == {BlockState.FREE}


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_rows_begin_to_come_loses_no_block(free, begun):
    free.store.at = "after they began" if begun else "before they begin"
    with pytest.raises(KeyboardInterrupt):
        free.begin(*FIRST)
    free.buffer.abandon_unclaimed()
    assert set(free.buffer.landing.states()) == {BlockState.FREE}


def test_nothing_begins_in_a_closed_buffer(free):
    free.buffer.close()
    with pytest.raises(RuntimeError):
        free.begin(*FIRST)
    free.buffer.abandon_unclaimed()


def test_closing_waits_for_what_is_under_way(tmp_path):
    line = Line(tmp_path, calls=DriveCalls())
    landed = [line.begin(*one) for one in SETS]
    line.close()
    for one, own in zip(landed, SETS, strict=True):
        assert one.fault() is None
        line.assert_landed(one, *own)


@pytest.mark.parametrize("where", ["a base", "being written", "a small buffer"])
def test_rows_that_the_library_cannot_reach_are_read_by_python(tmp_path, where):
    line = Line(tmp_path, calls=DriveCalls())
    held = threading.Event()
    if where == "a base":
        line.store.freeze(ROWS // 64, line.store.fresh_files())
    elif where == "being written":
        line.store.behind_writes(held.wait)
        group = line.rows[0][:64].copy()
        memory = aligned_buffer(group.nbytes)
        memory[:] = group.reshape(-1)
        line.store.write_groups(0, np.array([0]), memory.reshape(64, -1), lambda: None)
    else:
        line.store.close()
        line.store = ColdStore(tmp_path, SHAPE, 1, line.engine, line.counters)
        line.store.write_groups(0, np.arange(ROWS // 64), line.rows[0], lambda: None)
        line.store.settle_all(0)
        line.buffer.close()
        line.buffer = PrefetchBuffer(line.store, LandingArea(64, 8, ROW_BYTES))
    landed = line.begin(*FIRST)
    held.set()
    assert landed.ahead is None
    arrived(line, landed)
    line.assert_landed(landed, *FIRST)
    line.buffer.let_go(landed)
    line.close()
