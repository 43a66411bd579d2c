# SPDX-License-Identifier: Apache-2.0
"""Value codes in a file of their own: what is found there, what it takes, and what is damaged."""

import errno
import os
from contextlib import closing, suppress

import numpy as np
import pytest
from interrupts import interrupted_at

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import ColdFile, probe_io_mode, round_up
from hillinfer.drive.read_engines import lander_of
from hillinfer.errors import HillInferWarning
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.native.structures import row_addresses
from hillinfer.settings import IOChoice
from hillinfer.shadow.code_file import CodeFile, table_bytes
from hillinfer.shadow.coming_codes import buffer_bytes, record_bytes
from hillinfer.statistics import Counters
from hillinfer_model.kernel_spec import KernelSpec

# 3 heads of 64 channels: 99 bytes of a token, 128 in the file.
SPEC = KernelSpec(64, 3, 3, segment_tokens=512)
LAYERS, GROUP = 2, 64


class Calls(DriveCalls):
    """The operating system, whose writes a test lets fail or changes."""

    fails = flips = False
    descriptor = -1

    def pwrite(self, descriptor, data, offset):
        self.descriptor = descriptor
        if self.fails:
            raise OSError(errno.ENOSPC, "no space")
        if self.flips:
            # Behind the checksums, which were taken before.
            np.frombuffer(data, np.uint8)[70 * 128 + 5] ^= 1
        return super().pwrite(descriptor, data, offset)


class Opened:
    def __init__(self, directory, calls=None):
        self.calls, self.counters, self.own = calls or Calls(), Counters(), Counters()
        self.accountant = Accountant(16 << 20)
        self.engine = open_engine(IOChoice.THREADS, 2, self.calls)
        self.file = CodeFile(
            directory, probe_io_mode(directory), SPEC, LAYERS, self.engine, self.accountant,
            self.counters, self.calls,
        )  # fmt: skip
        self.file.expect(300)

    def close(self):
        self.file.close()
        self.engine.close()

    def write(self, layer, rows, number=7, seed=0):
        codes = np.random.default_rng(seed).integers(0, 256, (len(rows), 99), np.uint8)
        self.file.write(layer, rows, number, codes)
        return codes

    def fill(self, layer, rows, number=7, key="key"):
        out, numbers = np.zeros((len(rows), 99), np.uint8), np.full(len(rows), number)
        places = row_addresses(out, np.arange(len(rows)))
        came = self.file.fill(layer, key, rows, numbers, places, self.own)
        native_library().copy_rows(places, out)
        self.file.let_go(layer, key)
        return came, out


@pytest.fixture
def opened(cold_dir):
    with closing(Opened(cold_dir)) as made:
        yield made


def test_codes_of_whole_groups_come_back(opened):
    rows = np.arange(GROUP, 4 * GROUP)
    codes = opened.write(1, rows)
    wanted = np.array([64, 70, 199, 255])
    came, found = opened.fill(1, wanted)
    assert came.all()
    assert np.array_equal(found, codes[wanted - GROUP])
    # Others' groups, another layer and another number have none.
    for layer, some, number in ((1, [3, 256], 7), (0, [70], 7), (1, [70], 8)):
        came, found = opened.fill(layer, np.array(some), number)
        assert not came.any()
        assert not found.any()


def test_codes_of_whole_groups_are_read_back_as_they_were_written(opened):
    # Two runs of the file, and not in its order.
    rows = np.concatenate([np.arange(5 * GROUP, 6 * GROUP), np.arange(GROUP, 3 * GROUP)])
    codes = opened.write(1, rows)
    assert np.array_equal(opened.file.written(1, rows, 7), codes)
    # Others' codes, another layer, and groups that are not all there.
    assert opened.file.written(1, rows, 8) is None
    assert opened.file.written(0, rows, 7) is None
    assert opened.file.written(1, np.arange(GROUP, 4 * GROUP), 7) is None
    opened.calls.flips = True
    opened.write(1, rows[GROUP:])
    assert opened.file.written(1, rows[GROUP:], 7) is None


def test_what_was_begun_is_taken_and_the_rest_is_read(opened):
    codes = opened.write(0, np.arange(4 * GROUP))
    begun = np.array([200, 3, 90])
    assert opened.file.begin(0, "key", begun, np.full(3, 7)).all()
    # Two of them are not wanted any more, and others are; one has no codes.
    wanted = np.array([255, 90, 4 * GROUP, 17])
    came, found = opened.fill(0, wanted)
    assert came.tolist() == [True, True, False, True]
    assert np.array_equal(found[came], codes[wanted[came]])
    assert not found[2].any()
    assert (opened.counters.coded_reads, opened.own.coded_reads) == (3, 3)
    # What was begun under another number is not taken.
    opened.file.begin(0, "key", begun, np.full(3, 7))
    assert not opened.fill(0, begun, 8)[0].any()


def test_layers_and_distant_groups_do_not_meet(opened):
    groups = [0, 1, 63, 64, 65, 200]
    rows = np.concatenate([np.arange(one * GROUP, (one + 1) * GROUP) for one in groups])
    parts, codes = (rows[:192], rows[192:]), {}
    for layer in range(LAYERS):
        written = [opened.write(layer, part, 7, layer) for part in parts]
        codes[layer] = np.concatenate(written)
    wanted = np.array([1, 64, 63 * 64, 64 * 64 + 63, 65 * 64, 200 * 64 + 9])
    for layer in range(LAYERS):
        _, found = opened.fill(layer, wanted)
        assert np.array_equal(found, codes[layer][np.searchsorted(rows, wanted)])


def test_groups_that_are_not_whole_are_left_out(opened):
    opened.write(0, np.arange(10, 2 * GROUP + 5))
    came, _ = opened.fill(0, np.array([10, 63, 64, 127, 128]))
    assert came.tolist() == [False, False, True, True, False]


def test_rows_behind_all_that_there_is_room_for_have_no_codes(opened):
    last = TABLE_GROWTH_ROWS - GROUP
    opened.write(0, np.arange(last, last + GROUP))
    wanted = np.array([last, TABLE_GROWTH_ROWS, 9 * TABLE_GROWTH_ROWS])
    assert opened.file.covers(0, wanted, np.full(3, 7)).tolist() == [True, False, False]


def test_what_is_coming_is_told_by_its_tokens(opened):
    opened.write(0, np.arange(2 * GROUP))
    wanted, numbers = np.array([3, 70]), np.full(2, 7)
    assert not opened.file.has_begun_all(0, "key", wanted, numbers)
    opened.file.begin(0, "key", wanted, numbers)
    assert opened.file.has_begun_all(0, "key", wanted, numbers)
    for other in ((wanted[::-1], numbers), (wanted, numbers + 1), (wanted[:1], numbers[:1])):
        assert not opened.file.has_begun_all(0, "key", *other)


def test_groups_that_went_are_forgotten(opened):
    opened.write(0, np.arange(4 * GROUP))
    opened.file.forget_groups([1, 900])
    came, _ = opened.fill(0, np.array([0, 64, 130]))
    assert came.tolist() == [True, False, True]


def test_what_is_taken_and_read_is_counted(opened, cold_dir):
    before = opened.accountant.held()
    assert before[Part.STAGING] == buffer_bytes(SPEC, 300)
    opened.write(0, np.arange(2 * GROUP))
    assert opened.accountant.held()[Part.OTHER] == table_bytes(LAYERS, TABLE_GROWTH_ROWS)
    assert opened.counters.cold_write_bytes == 2 * GROUP * record_bytes(SPEC)
    opened.fill(0, np.array([9, 20, 50]))
    with closing(ColdFile(cold_dir, probe_io_mode(cold_dir))) as alike:
        unit, record = alike.read_unit, record_bytes(SPEC)
    for counters in (opened.counters, opened.own):
        assert (counters.cold_reads, counters.coded_reads) == (1, 3)
        # From the first record's sector, or page where the file system wants pages, to the last's.
        read = round_up(51 * record, unit) - 9 * record // unit * unit
        assert counters.cold_read_bytes == read


def test_after_codes_that_changed_all_come_as_rows(opened):
    """Who asks is told of the place once, and gets what came before it."""
    opened.calls.flips = True
    opened.write(0, np.arange(2 * GROUP))
    opened.calls.flips = False
    assert opened.fill(0, np.array([1, 69]))[0].all()
    opened.write(1, np.arange(2 * GROUP))
    coming = 1, "next", np.array([1]), np.array([7])
    assert opened.file.begin(*coming).all()
    assert opened.file.has_begun_all(*coming)
    with pytest.warns(HillInferWarning, match=rf"128 bytes at {70 * 128} of codes of values"):
        came, found = opened.fill(0, np.array([1, 70]))
    assert not opened.file.has_begun_all(*coming)
    assert not came.any()
    assert not found.any()
    # Nothing is written or found any more, and nobody is told again.
    opened.write(0, np.arange(2 * GROUP, 3 * GROUP))
    for row in (1, 2 * GROUP):
        assert not opened.fill(0, np.array([row]))[0].any()


def test_after_a_read_that_failed_all_come_as_rows(opened):
    opened.write(0, np.arange(2 * GROUP))
    opened.file.begin(0, "key", np.array([3]), np.array([7]))
    assert opened.fill(0, np.array([3]))[0].all()
    os.ftruncate(opened.calls.descriptor, 0)
    with pytest.warns(HillInferWarning, match="could not read .* of codes of values"):
        assert not opened.fill(0, np.array([3]))[0].any()
    assert not opened.fill(0, np.array([3]))[0].any()


def test_what_cannot_be_written_is_not_there(opened):
    opened.write(0, np.arange(GROUP))
    opened.calls.fails = True
    opened.write(0, np.arange(GROUP, 2 * GROUP))
    came, _ = opened.fill(0, np.array([3, 70]))
    assert came.tolist() == [True, False]


def test_buffers_that_are_in_use_leave_it_to_rows(opened):
    opened.write(0, np.arange(2 * GROUP))
    wanted, numbers = np.array([3]), np.array([7])
    begun = [opened.file.begin(0, key, wanted, numbers).all() for key in "abc"]
    assert begun == [True, True, False]
    # Asking anew gives up what was begun before; more than there is room for is not begun.
    assert opened.file.begin(0, "b", wanted, numbers).all()
    opened.file.drop()
    many = np.arange(2 * GROUP).repeat(3)
    assert not opened.file.begin(0, "d", many, np.full(len(many), 7)).any()
    assert opened.file.begin(0, "d", wanted, numbers).all()


def test_codes_stay_where_they_came_until_they_are_let_go(opened):
    codes = opened.write(0, np.arange(2 * GROUP))
    wanted, numbers, places = np.array([3, 90]), np.full(2, 7), np.zeros(2, np.uint64)
    assert opened.file.fill(0, "a", wanted, numbers, places, opened.own).all()
    # The other buffer is free alone, and what is read to it is elsewhere.
    begun = [opened.file.begin(0, key, wanted + 1, numbers).all() for key in "bc"]
    assert begun == [True, False]
    assert opened.fill(0, wanted + 1, key="b")[0].all()
    found = np.zeros((2, 99), np.uint8)
    native_library().copy_rows(places, found)
    assert np.array_equal(found, codes[wanted])
    for let_go in (lambda: opened.file.let_go(0, "a"), opened.file.drop):
        let_go()
        begun = [opened.file.begin(0, key, wanted, numbers).all() for key in "bcd"]
        assert begun == [True, True, False]
        opened.file.drop()
        # A step that broke off lets nothing go by itself.
        assert opened.file.fill(0, "a", wanted, numbers, places, opened.own).all()


def test_the_rest_is_read_while_the_next_layers_codes_are_on_their_way(opened):
    codes = opened.write(0, np.arange(4 * GROUP))
    opened.write(1, np.arange(GROUP))
    assert opened.file.begin(0, "key", np.array([200, 3]), np.full(2, 7)).all()
    assert opened.file.begin(1, "key", np.array([5]), np.array([7])).all()
    wanted = np.array([3, 90, 200, 255, 4 * GROUP])
    came, found = opened.fill(0, wanted)
    assert came.tolist() == [True, True, True, True, False]
    assert np.array_equal(found[:4], codes[wanted[:4]])
    assert opened.fill(1, np.array([5]))[0].all()
    # As many buffers are free as before.
    begun = [opened.file.begin(0, key, wanted[:4], np.full(4, 7)).all() for key in "abc"]
    assert begun == [True, True, False]


def test_an_interrupt_leaves_no_buffer_taken_or_given_twice(opened):
    codes = opened.write(0, np.arange(4 * GROUP))
    first, second = np.array([200, 3]), np.array([90, 255])
    numbers, places = np.full(2, 7), {key: np.zeros(2, np.uint64) for key in "ab"}

    def use():
        opened.file.begin(0, "a", first, numbers)
        opened.file.begin(0, "b", second, numbers)
        opened.file.fill(0, "a", first + 1, numbers, places["a"], opened.own)
        opened.file.let_go(0, "a")
        opened.file.took(0, "b", opened.own)

    number, has_come = 0, True
    while has_come:
        with interrupted_at(CodeFile.begin, number) as interrupt, suppress(KeyboardInterrupt):
            use()
        has_come, number = interrupt.left < 0, number + 1
        # As a step begins after one that broke off.
        opened.file.drop()
        for key, rows in ("a", first), ("b", second):
            assert opened.file.begin(0, key, rows, numbers).all(), number
        assert not opened.file.begin(0, "c", first, numbers).any(), number
        for key, rows in ("a", first), ("b", second):
            assert opened.file.fill(0, key, rows, numbers, places[key], opened.own).all()
        for key, rows in ("a", first), ("b", second):
            found = np.zeros((2, 99), np.uint8)
            native_library().copy_rows(places[key], found)
            assert np.array_equal(found, codes[rows]), number
            opened.file.let_go(0, key)
    assert number > 40


def test_buffers_that_grow_drop_what_was_begun(opened):
    codes = opened.write(0, np.arange(2 * GROUP))
    opened.file.begin(0, "key", np.array([3]), np.array([7]))
    opened.file.expect(1000)
    assert opened.accountant.held()[Part.STAGING] == buffer_bytes(SPEC, 1000)
    _, found = opened.fill(0, np.array([5]))
    assert np.array_equal(found[0], codes[5])


def test_nobody_reads_to_buffers_that_are_too_small(opened, monkeypatch):
    """While they grow, another thread asks for more than the old ones hold."""
    rows, begun, others, zeros = np.arange(6 * GROUP), [], [], np.zeros
    opened.write(0, rows)

    def asked(shape, *given):
        if not others:
            others.append("asks")
            begun.append(opened.file.begin(0, "key", rows, np.full(len(rows), 7)).any())
        return zeros(shape, *given)

    monkeypatch.setattr(np, "zeros", asked)
    opened.file.expect(1000)
    assert begun == [False]
    assert opened.file.begin(0, "key", rows, np.full(len(rows), 7)).all()


def test_codes_come_alike_where_somebody_looks_at_reads(cold_dir):
    """A thread of Python's then brings what one of the library's brings else."""

    class Seen(Calls):
        landings = 0

        def land(self, *given):
            self.landings += 1
            return super().land(*given)

    wanted = np.array([200, 3, 90, 17])
    with closing(Opened(cold_dir)) as native, closing(Opened(cold_dir, Seen())) as seen:
        for one in (native, seen):
            one.write(0, np.arange(4 * GROUP))
            assert one.file.begin(0, "key", wanted[:2], np.full(2, 7)).all()
        found = [one.fill(0, wanted) for one in (native, seen)]
        assert np.array_equal(found[0][1], found[1][1])
        assert found[0][0].all()
        for name in ("cold_reads", "cold_read_bytes", "cold_useful_bytes", "coded_reads"):
            assert getattr(native.counters, name) == getattr(seen.counters, name) > 0
        assert seen.calls.landings == 2
        assert lander_of(seen.engine) is None
        beside = lander_of(native.engine)
        assert beside is not None
        beside.close()
