# SPDX-License-Identifier: Apache-2.0
"""Rows that the native library lands are those of its twin: bytes, reads, errors and checksums."""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from drive_fixtures import in_the_place_of
from engine_cases import SKIP, kernel_permits_rings
from landings import (
    CONTENT_BYTES,
    WAYS,
    SeenReads,
    file_of,
    land,
    random_content,
    rows_of,
    sums_of_file,
    wanted_rows,
)

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import PAGE_BYTES, IOMode, aligned_buffer, probe_io_mode
from hillinfer.drive.landing import FileRows
from hillinfer.errors import ColdPoolError

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from faulty_calls import FAULTS, Fault, FaultyCalls, Injection, WithoutNativeReads

NATIVE = tuple(way for way in WAYS if way != "twin")


def some(seed, count, most):
    return np.random.default_rng(seed).choice(most, min(count, most), replace=False)


def last(row_bytes, count):
    end = CONTENT_BYTES // row_bytes
    return np.arange(end - count, end)


# Name: bytes of a row, row numbers, bytes of the buffer.
CASES = {
    "scattered": (1024, some(1, 300, 3000), 1 << 20),
    "scattered, many batches": (1024, some(2, 300, 3000), 1024 + 3 * PAGE_BYTES),
    "in order": (1024, np.sort(some(3, 300, 3000)), 1 << 20),
    "backwards": (768, np.arange(400)[::-1], 1 << 16),
    "neighbours": (64, np.arange(100, 5000), 1 << 18),
    "pairs": (4096, (np.sort(some(4, 60, 300))[:, None] * 2 + [0, 1]).reshape(-1), 1 << 16),
    "over page ends": (4160, some(5, 200, 700), 1 << 18),
    "odd multiples of 64": (320, some(6, 400, 9000), 40_000),
    "one row": (2048, np.array([700]), 1 << 16),
    "the first and the last": (1024, np.array([CONTENT_BYTES // 1024 - 1, 0]), 1 << 16),
    "the end of the file": (192, last(192, 50), 1 << 16),
    "longer than a read": (300 << 10, np.array([3, 0, 5]), 1 << 20),
    "to their places": (12_288, some(7, 100, 250), 1 << 16),
    "all to their places": (16_384, np.arange(192), 1 << 16),
}


@pytest.fixture(scope="module")
def content():
    return random_content()


@pytest.fixture(params=IOMode)
def mode(request, tmp_path):
    if request.param is IOMode.DIRECT and probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O: set --basetemp to a drive")
    return request.param


@pytest.fixture(params=NATIVE)
def way(request):
    if request.param == "ring" and not kernel_permits_rings():
        pytest.skip(SKIP)
    return request.param


@pytest.fixture
def file(tmp_path, mode, content):
    made = file_of(tmp_path, mode, content, SeenReads())
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_rows_and_reads_are_those_of_the_twin(way, file, content, name):
    row_bytes, rows, buffer_bytes = CASES[name]
    sums = sums_of_file(content, row_bytes)
    found, right = (
        land(one, file, wanted_rows(rows, row_bytes, buffer_bytes, sums), file.seen)
        for one in (way, "twin")
    )
    np.testing.assert_array_equal(found.out, right.out)
    assert found.landed == right.landed
    assert found.landed.wrong is None
    in_order = sorted if way == "ring" else list
    assert in_order(found.reads) == in_order(right.reads)
    places = wanted_rows(rows, row_bytes, buffer_bytes).places
    np.testing.assert_array_equal(found.out[places], rows_of(content, row_bytes)[rows])


@pytest.mark.parametrize("name", CASES)
def test_rows_come_right_where_nobody_watches(way, file, content, name):
    """Rows are copied while other reads are under way, and not before all of theirs came."""
    row_bytes, rows, buffer_bytes = CASES[name]
    engine, sums = WAYS[way](DriveCalls()), sums_of_file(content, row_bytes)
    wanted = wanted_rows(rows, row_bytes, buffer_bytes, sums)
    landed = engine.land(file, wanted)
    engine.close()
    assert landed.wrong is None
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, row_bytes)[rows])


@pytest.mark.parametrize("name", CASES)
def test_a_bit_that_flips_in_the_file_differs_and_is_told(way, file, content, name):
    row_bytes, rows, buffer_bytes = CASES[name]
    sums = sums_of_file(content, row_bytes)
    unspoilt = land("twin", file, wanted_rows(rows, row_bytes, buffer_bytes), file.seen).out
    at = int(rows[len(rows) // 2]) * row_bytes + row_bytes - 1
    flip(file, content, at)
    found, right = (
        land(one, file, wanted_rows(rows, row_bytes, buffer_bytes, sums), file.seen)
        for one in (way, "twin")
    )
    assert (found.out != unspoilt).sum() == 1
    np.testing.assert_array_equal(found.out, right.out)
    assert found.landed.wrong == right.landed.wrong == len(rows) // 2


def flip(file, content, at):
    descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    os.pwrite(descriptor, bytes([content[at] ^ 1]), at)
    os.fsync(descriptor)
    os.close(descriptor)


def test_the_first_of_several_wrong_rows_is_told(way, file, content):
    rows = some(8, 200, 3000)
    sums = sums_of_file(content, 1024)
    for which in (150, 40, 90):
        sums[rows[which]] ^= 1
    for one in (way, "twin"):
        outcome = land(one, file, wanted_rows(rows, 1024, 1 << 16, sums), file.seen)
        assert outcome.landed.wrong == 40


# --- what fails ---------------------------------------------------------------------------------


def truncated(file):
    os.truncate(f"/proc/self/fd/{file.descriptor}", CONTENT_BYTES // 2)


def lost_all(file):
    os.truncate(f"/proc/self/fd/{file.descriptor}", 0)


def error_of(way, file, row_bytes, rows):
    with pytest.raises(ColdPoolError) as told:
        land(way, file, wanted_rows(rows, row_bytes, 1 << 17), file.seen)
    return str(told.value)


@pytest.mark.parametrize("spoil", [truncated, lost_all])
@pytest.mark.parametrize("row_bytes", [1024, 16_384])
def test_a_file_that_lost_its_end_is_told_as_by_the_twin(way, file, spoil, row_bytes):
    rows = np.arange(0, CONTENT_BYTES // row_bytes, 3)
    spoil(file)
    said = error_of(way, file, row_bytes, rows)
    assert said == error_of("twin", file, row_bytes, rows)
    assert f"and should be {CONTENT_BYTES}" in said


def test_rows_before_the_end_that_is_lost_come(way, file, content):
    truncated(file)
    rows = np.arange(0, CONTENT_BYTES // 2048, 7)
    found = land(way, file, wanted_rows(rows, 1024, 1 << 17), file.seen)
    places = wanted_rows(rows, 1024, 1 << 17).places
    np.testing.assert_array_equal(found.out[places], rows_of(content, 1024)[rows])


@pytest.mark.parametrize(
    ("path", "flags", "reason"),
    [
        ("/dev/null", os.O_WRONLY, os.strerror(errno.EBADF)),
        ("/", os.O_RDONLY, os.strerror(errno.EISDIR)),
    ],
)
def test_a_descriptor_that_is_not_read_is_told_as_by_the_twin(way, file, path, flags, reason):
    rows = some(9, 100, 3000)
    with in_the_place_of(file, path, flags):
        said = error_of(way, file, 1024, np.sort(rows))
        assert said == error_of("twin", file, 1024, np.sort(rows))
    assert reason in said
    assert "bytes at" in said
    assert "rows of layer 4" in said


def test_zeros_of_another_file_are_known_by_their_checksums(way, file, content):
    rows, sums = some(10, 50, 3000), sums_of_file(content, 1024)
    with in_the_place_of(file, "/dev/full", os.O_RDWR):
        for one in (way, "twin"):
            outcome = land(one, file, wanted_rows(rows, 1024, 1 << 20, sums), file.seen)
            assert outcome.landed.wrong == 0


@pytest.mark.parametrize("row_bytes", [1024, 16_384])
@pytest.mark.parametrize("index", [0, 5, None])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in ("land", "ring_enter", "read_done") for fault in FAULTS[kind]],
)
def test_what_does_not_come_is_read_again(way, tmp_path, content, row_bytes, kind, fault, index):
    if kind == "ring_enter" and way != "ring":
        pytest.skip("threads enter no ring")
    if kind != "read_done" and index == 5:
        index = 1 if kind == "ring_enter" else 0
    calls = FaultyCalls(Injection(kind, index, fault), delay_seconds=0.001)
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    rows = some(11, 60, CONTENT_BYTES // row_bytes)
    wanted = wanted_rows(rows, row_bytes, 1 << 16, sums_of_file(content, row_bytes))
    engine = WAYS[way](calls)
    landed = engine.land(file, wanted)
    engine.close()
    file.close()
    assert calls.hits >= 1
    assert landed.wrong is None
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, row_bytes)[rows])


def test_one_that_believed_what_had_come_would_be_seen(way, tmp_path, content):
    """The twin of the test before: where the kernel tells all, spoilt bytes stay."""

    class Spoilt(FaultyCalls):
        def read_done(self, descriptor, into, offset, result):
            super().read_done(descriptor, into, offset, result)
            return result

    calls = Spoilt(Injection("read_done", 5, Fault.NOTHING))
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    rows, sums = some(11, 60, 3000), sums_of_file(content, 1024)
    engine, wanted = WAYS[way](calls), wanted_rows(rows, 1024, 1 << 20, sums)
    landed = engine.land(file, wanted)
    engine.close()
    file.close()
    assert landed.wrong is not None
    assert (wanted.out[wanted.places] != rows_of(content, 1024)[rows]).any()


def test_where_nothing_comes_natively_all_is_read_the_ordinary_way(way, tmp_path, content):
    calls = SeenReads()
    file = file_of(tmp_path, probe_io_mode(tmp_path), content, calls)
    rows = some(12, 100, 3000)
    wanted = wanted_rows(rows, 1024, 1 << 16)
    engine = WAYS[way](WithoutNativeReads())
    landed = engine.land(file, wanted)
    engine.close()
    file.close()
    assert len(calls.reads) == landed.cost.reads
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, 1024)[rows])


def test_an_error_of_the_ordinary_way_leaves_the_engine_as_it_was(way, tmp_path, content):
    class Broken(DriveCalls):
        is_broken = True

        def preadv(self, descriptor, into, offset):
            if self.is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(descriptor, into, offset)

    calls = Broken()
    file = file_of(tmp_path, probe_io_mode(tmp_path), content, calls)
    rows, engine = some(12, 100, 3000), WAYS[way](WithoutNativeReads())
    with pytest.raises(ColdPoolError, match=r"could not read \d+ bytes at \d+ of rows of layer 4"):
        engine.land(file, wanted_rows(rows, 1024, 1 << 16))
    calls.is_broken = False
    wanted = wanted_rows(rows, 1024, 1 << 16)
    engine.land(file, wanted)
    np.testing.assert_array_equal(wanted.out[wanted.places], rows_of(content, 1024)[rows])
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.land(file, wanted)
    file.close()


# --- threads, forks and interrupts --------------------------------------------------------------


def test_threads_land_at_once(way, tmp_path, content):
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    engine, wrong = WAYS[way](DriveCalls()), []

    def use(seed):
        for turn in range(6):
            rows = some(100 * seed + turn, 80, 3000)
            wanted = wanted_rows(rows, 1024, 1 << 16, seed=turn)
            engine.land(file, wanted)
            if not np.array_equal(wanted.out[wanted.places], rows_of(content, 1024)[rows]):
                wrong.append(seed)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    engine.close()
    file.close()
    assert not wrong


def test_a_child_of_a_fork_lands_by_itself(way, tmp_path, content):
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    engine, rows = WAYS[way](DriveCalls()), some(13, 100, 3000)

    def is_right():
        wanted = wanted_rows(rows, 1024, 1 << 16)
        engine.land(file, wanted)
        return np.array_equal(wanted.out[wanted.places], rows_of(content, 1024)[rows])

    assert is_right()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if is_right() else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert is_right()
    engine.close()
    file.close()


def test_python_runs_while_rows_land(way, tmp_path, content):
    """Nothing is landed by Python: another of its threads goes on in the middle of a call."""

    class Waiting(SeenReads):
        went_on = False

        def read_done(self, *given):
            # The thread that lands has Python's lock here alone.
            return super().read_done(*given)

        def land(self, *given):
            started = time.monotonic()
            threading.Thread(target=self.go_on).start()
            while not self.went_on and time.monotonic() < started + 60:
                super().land(*given)
            return super().land(*given)

        def go_on(self):
            self.went_on = True

    calls = Waiting()
    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    engine = WAYS[way](calls)
    engine.land(file, wanted_rows(some(14, 100, 3000), 1024, 1 << 16))
    engine.close()
    file.close()
    assert calls.went_on


def test_an_interrupt_leaves_no_read_behind(way, tmp_path, content):
    """Ctrl-C in the middle of landing is seen when the call has returned, and never before."""

    class Interrupted(DriveCalls):
        interrupts = 1

        def land(self, *given):
            if not self.interrupts:
                return super().land(*given)
            self.interrupts = 0
            main = threading.main_thread().ident
            threading.Timer(0.002, signal.pthread_kill, (main, signal.SIGINT)).start()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                given[1].landed = 0
                super().land(*given)
            return super().land(*given)

    file = file_of(tmp_path, probe_io_mode(tmp_path), content)
    engine = WAYS[way](Interrupted())
    out, buffer = np.zeros((3000, 1024), np.uint8), aligned_buffer(1 << 20)
    every = np.arange(3000)
    with pytest.raises(KeyboardInterrupt):
        engine.land(file, FileRows(every, out, every, buffer))
    buffer[:] = 0
    out[:] = 0
    time.sleep(0.05)
    assert not buffer.any()
    assert not out.any()
    engine.land(file, FileRows(every, out, every, buffer))
    np.testing.assert_array_equal(out, rows_of(content, 1024)[:3000])
    engine.close()
    file.close()
