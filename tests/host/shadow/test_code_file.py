# SPDX-License-Identifier: Apache-2.0
"""Value codes in a file of their own: what is found there, what it takes, and what is damaged."""

import errno
from contextlib import closing

import numpy as np
import pytest

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import probe_io_mode
from hillinfer.errors import ColdPoolError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.settings import IOChoice
from hillinfer.shadow.code_file import CodeFile, buffer_bytes, record_bytes, table_bytes
from hillinfer.shadow.code_seats import CodeSeats
from hillinfer.shadow.values import ValueCodes
from hillinfer.statistics import Counters
from hillinfer_model.kernel_spec import KernelSpec

# 3 heads of 64 channels: 99 bytes of a token, 128 in the file.
SPEC = KernelSpec(64, 3, 3, segment_tokens=512)
LAYERS, GROUP = 2, 64


class Calls(DriveCalls):
    """The operating system, whose writes a test lets fail or changes."""

    fails = flips = False

    def pwrite(self, descriptor, data, offset):
        if self.fails:
            raise OSError(errno.ENOSPC, "no space")
        if self.flips:
            # Behind the checksums, which were taken before.
            np.frombuffer(data, np.uint8)[70 * 128 + 5] ^= 1
        return super().pwrite(descriptor, data, offset)


class Opened:
    def __init__(self, directory):
        self.calls, self.counters = Calls(), Counters()
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

    def read(self, layer, rows, numbers=7):
        numbers = np.full(len(rows), numbers)
        come = self.file.begin(layer, "key", rows, numbers)
        return come, self.file.take(layer, "key", Counters())


@pytest.fixture
def opened(cold_dir):
    with closing(Opened(cold_dir)) as made:
        yield made


def test_codes_of_whole_groups_come_back(opened):
    rows = np.arange(GROUP, 4 * GROUP)
    codes = opened.write(1, rows)
    wanted = np.array([64, 70, 199, 255])
    come, brought = opened.read(1, wanted)
    assert come.all()
    assert np.array_equal(brought.codes, codes[wanted - GROUP])
    assert np.array_equal(brought.rows, wanted)
    # Others' groups, another layer and another number have none.
    for layer, some, number in ((1, [3, 256], 7), (0, [70], 7), (1, [70], 8)):
        come, brought = opened.read(layer, np.array(some), number)
        assert not come.any()
        assert brought is None


def test_layers_and_distant_groups_do_not_meet(opened):
    groups = [0, 1, 63, 64, 65, 200]
    rows = np.concatenate([np.arange(one * GROUP, (one + 1) * GROUP) for one in groups])
    parts, codes = (rows[:192], rows[192:]), {}
    for layer in range(LAYERS):
        written = [opened.write(layer, part, 7, layer) for part in parts]
        codes[layer] = np.concatenate(written)
    wanted = np.array([1, 64, 63 * 64, 64 * 64 + 63, 65 * 64, 200 * 64 + 9])
    for layer in range(LAYERS):
        _, brought = opened.read(layer, wanted)
        assert np.array_equal(brought.codes, codes[layer][np.searchsorted(rows, wanted)])


def test_groups_that_are_not_whole_are_left_out(opened):
    opened.write(0, np.arange(10, 2 * GROUP + 5))
    come, _ = opened.read(0, np.array([10, 63, 64, 127, 128]))
    assert come.tolist() == [False, False, True, True, False]


def test_groups_that_went_are_forgotten(opened):
    opened.write(0, np.arange(4 * GROUP))
    opened.file.forget_groups([1, 900])
    come, brought = opened.read(0, np.array([0, 64, 130]))
    assert come.tolist() == [True, False, True]
    assert len(brought.codes) == 2


def test_what_is_taken_and_read_is_counted(opened):
    before = opened.accountant.held()
    assert before[Part.STAGING] == buffer_bytes(SPEC, 300)
    opened.write(0, np.arange(2 * GROUP))
    assert opened.accountant.held()[Part.OTHER] == table_bytes(LAYERS, 4096)
    assert opened.counters.cold_write_bytes == 2 * GROUP * record_bytes(SPEC)
    opened.read(0, np.array([1, 2, 90]))
    counters = opened.counters
    assert (counters.cold_reads, counters.coded_reads, counters.coded_arrivals) == (1, 3, 3)
    # Two pages of the first record to the last one's end.
    assert counters.cold_read_bytes == 3 * 4096


def test_changed_codes_are_an_error_that_names_the_place(opened):
    opened.calls.flips = True
    opened.write(0, np.arange(2 * GROUP))
    _, brought = opened.read(0, np.array([1, 69]))
    assert len(brought.codes) == 2
    opened.file.begin(0, "key", np.array([1, 70]), np.array([7, 7]))
    with pytest.raises(ColdPoolError, match=rf"128 bytes at {70 * 128} of codes of values"):
        opened.file.take(0, "key", Counters())


def test_what_cannot_be_written_is_not_there(opened):
    opened.write(0, np.arange(GROUP))
    opened.calls.fails = True
    opened.write(0, np.arange(GROUP, 2 * GROUP))
    come, _ = opened.read(0, np.array([3, 70]))
    assert come.tolist() == [True, False]


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


def test_codes_have_a_seat_as_long_as_a_step_lasts(opened):
    seats = CodeSeats(opened.file)
    values = ValueCodes(SPEC, LAYERS, opened.accountant, lambda: 0, lambda _: None, seats.make_pool)
    rows = np.arange(4 * GROUP)
    opened.write(0, rows)
    values.find(0, rows, np.full(len(rows), 7))
    wanted, numbers = np.array([5, 200]), np.array([7, 7])
    opened.file.begin(0, "key", wanted, numbers)
    with seats.seated(0, "key", values, Counters()):
        found, _ = values.find(0, np.array([5, 6, 200]), np.full(3, 7))
        assert [bool(one) for one in found] == [True, False, True]
        other, _ = values.find(0, np.array([5]), np.array([8]))
        assert not other.any()
    # There are no slots yet; with some, what came is offered and stays.
    assert not values.find(0, wanted, numbers)[0].any()
    values.begin_step()
    opened.file.begin(0, "key", wanted, numbers)
    with seats.seated(0, "key", values, Counters()):
        assert values.find(0, wanted, numbers)[0].all()
    assert values.find(0, wanted, numbers)[0].all()


def test_seats_go_where_slots_come(opened):
    """Whoever looks then reads rows; nothing points behind the slots."""
    pool = CodeSeats(opened.file).make_pool(99)
    pool.cover(4096)
    rows, numbers = np.array([5, 200]), np.array([7, 7])
    pool.seat(rows, numbers, np.zeros((2, 99), np.uint8))
    assert pool.find(rows, numbers)[0].all()
    pool.resize(64)
    assert not pool.find(rows, numbers)[0].any()
    pool.seat(rows, numbers, np.zeros((2, 99), np.uint8))
    pool.forget(np.array([9]))
    assert not pool.find(rows, numbers)[0].any()
    pool.unseat()
    assert pool.offer(rows, numbers, np.zeros((2, 99), np.uint8)) == 2
