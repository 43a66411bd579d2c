# SPDX-License-Identifier: Apache-2.0
"""Sets of rows that stand in line are read together, and each gets its own."""

import os
import threading

import numpy as np
import pytest
from drive_fixtures import in_the_place_of
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import RowSums
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.landing import BlockState, LandingArea
from hillinfer.errors import ColdPoolError
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.prefetch_buffer import PrefetchBuffer
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


class Line:
    """A prefetch buffer over a store of two layers, on a drive that can be held."""

    def __init__(self, folder, blocks=64, ahead_bytes=1 << 20):
        self.calls = Held()
        self.engine = open_engine(IOChoice.THREADS, 2, self.calls)
        sums = RowSums(LAYERS, Accountant(1 << 30))
        self.counters = Counters()
        self.store = ColdStore(
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

    def close(self):
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
    descriptor = os.open(f"/proc/self/fd/{line.store.files[0].descriptor}", os.O_RDWR)
    os.pwrite(descriptor, bytes([line.rows[0][1000, 5] ^ 1]), 1000 * ROW_BYTES + 5)
    os.fsync(descriptor)
    os.close(descriptor)
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
