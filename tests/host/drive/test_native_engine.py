# SPDX-License-Identifier: Apache-2.0
"""The native library's threads read as many at once as they should, and leave nothing behind."""

import errno
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from read_cases import PAGES, brought

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode
from hillinfer.drive.read_engines import NativeThreadEngine
from hillinfer.native.structures import ReadWay
from hillinfer.settings import IOChoice

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from faulty_calls import FAULTS, Fault, FaultyCalls, Injection

THREADS = 24


@contextmanager
def written(directory, content, calls=None):
    made = ColdFile(directory, probe_io_mode(directory), "rows of layer 4", calls)
    made.write(content.data, 0)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path, content):
    with written(tmp_path, content) as made:
        yield made


def pages(count, seed=0):
    chance = np.random.default_rng(seed)
    numbers = chance.integers(0, PAGES, count)
    return Reads(
        numbers * PAGE_BYTES, np.arange(count) * PAGE_BYTES, np.full(count, PAGE_BYTES, np.int64)
    )


def right(content, reads):
    numbers = reads.file_offsets // PAGE_BYTES
    return content.reshape(PAGES, PAGE_BYTES)[numbers].reshape(-1)


def threads_of_the_process():
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_are_native():
    native = open_engine(IOChoice.THREADS, THREADS, DriveCalls())
    assert (type(native), native.name) == (NativeThreadEngine, "threads")
    native.close()


def test_nothing_of_python_reads(tmp_path, content):
    class NoRead(DriveCalls):
        def preadv(self, *args):
            raise AssertionError("Python read")

    engine, reads = NativeThreadEngine(THREADS, DriveCalls()), pages(200)
    before = threading.active_count()
    with written(tmp_path, content, NoRead()) as file:
        np.testing.assert_array_equal(brought(engine, file, reads), right(content, reads))
    assert threading.active_count() == before
    # As many at once as were asked for, the caller's thread among them, and they stay.
    assert threads_of_the_process() >= THREADS
    engine.close()


def test_what_the_kernel_says_comes_back_for_each_read(file, content):
    reads = pages(6)
    # Past the end nothing comes; a page over it, half of what was asked for.
    reads.file_offsets[2] = PAGES * PAGE_BYTES
    reads.file_offsets[5] = (PAGES - 1) * PAGE_BYTES
    reads.byte_counts[5] = 2 * PAGE_BYTES
    buffer = aligned_buffer(8 * PAGE_BYTES)
    calls = DriveCalls()

    def found(descriptor, reads):
        way = ReadWay(None, None, descriptor, 4)
        return calls.read_many(way, reads, buffer.ctypes.data).tolist()

    assert found(file.descriptor, reads) == [4096, 4096, 0, 4096, 4096, 4096]
    assert found(-1, reads) == [-errno.EBADF] * 6
    assert found(file.descriptor, pages(0)) == []


def calls_of(read):
    """Return how many reads this thread asks the kernel for while it reads."""

    def count():
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))

    before = count()
    read()
    # Without those of the count itself, two or three.
    return count() - before - 2


@pytest.mark.parametrize(("joined_pages", "most"), [(0, 40), (1, 40), (4, 10), (7, 6), (64, 1)])
def test_neighbours_of_a_file_come_in_one_call_wherever_each_goes(
    file, content, joined_pages, most
):
    count = 40
    starts = PAGE_BYTES * (3 + np.arange(count))
    places = PAGE_BYTES * np.random.default_rng(1).permutation(count)
    reads = Reads(starts, places, np.full(count, PAGE_BYTES))
    buffer = aligned_buffer(count * PAGE_BYTES)
    way = ReadWay(None, None, file.descriptor, 1, joined_pages * PAGE_BYTES)
    found = []

    def read(wanted):
        return lambda: found.append(DriveCalls().read_many(way, wanted, buffer.ctypes.data))

    assert calls_of(read(reads)) == pytest.approx(most, abs=1)
    assert found[0].tolist() == [PAGE_BYTES] * count
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        np.testing.assert_array_equal(
            buffer[place : place + PAGE_BYTES], content[start : start + PAGE_BYTES]
        )
    # Pages that lie apart are calls of their own.
    apart = Reads(starts[::2], places[::2], np.full(count // 2, PAGE_BYTES))
    assert calls_of(read(apart)) == pytest.approx(count // 2, abs=1)


@pytest.mark.parametrize("threads", [1, 3])
def test_each_of_joined_reads_is_told_what_it_got(file, content, threads):
    """The last of them lies over the end of the file, in part and then whole."""
    count = 6
    starts = PAGE_BYTES * (PAGES - 3 + np.arange(count))
    sizes = np.full(count, PAGE_BYTES)
    reads = Reads(starts, PAGE_BYTES * np.arange(count), sizes)
    buffer = aligned_buffer(count * PAGE_BYTES)
    way = ReadWay(None, None, file.descriptor, threads, count * PAGE_BYTES)
    results = DriveCalls().read_many(way, reads, buffer.ctypes.data)
    assert results.tolist() == [PAGE_BYTES] * 3 + [0] * 3
    closed = ReadWay(None, None, -1, threads, count * PAGE_BYTES)
    results = DriveCalls().read_many(closed, reads, buffer.ctypes.data)
    assert results.tolist() == [-errno.EBADF] * count


@pytest.mark.parametrize("index", [0, 1, None])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in ("read_many", "read_done") for fault in FAULTS[kind]],
)
def test_what_does_not_come_is_read_again(file, content, kind, fault, index):
    calls = FaultyCalls(Injection(kind, index, fault), delay_seconds=0.001)
    engine = NativeThreadEngine(THREADS, calls)
    for seed in range(2):
        reads = pages(40, seed)
        np.testing.assert_array_equal(brought(engine, file, reads), right(content, reads))
    assert calls.hits >= 1
    engine.close()


def test_one_that_believed_the_kernel_blindly_would_be_seen(file, content):
    class Believed(FaultyCalls):
        def read_done(self, descriptor, into, offset, result):
            super().read_done(descriptor, into, offset, result)
            return result

    engine = NativeThreadEngine(THREADS, Believed(Injection("read_done", 5, Fault.SHORT)))
    reads = pages(40)
    assert not np.array_equal(brought(engine, file, reads), right(content, reads))
    engine.close()


def test_an_interrupt_leaves_no_read_behind(file, content):
    """Ctrl-C in the middle of a batch is seen when all of it came, and never before."""

    class Interrupted(DriveCalls):
        interrupts = 1

        def read_many(self, *args):
            if not self.interrupts:
                return super().read_many(*args)
            self.interrupts = 0
            main = threading.main_thread().ident
            threading.Timer(0.002, signal.pthread_kill, (main, signal.SIGINT)).start()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                super().read_many(*args)
            return super().read_many(*args)

    calls, buffer = Interrupted(), aligned_buffer(4096 * PAGE_BYTES)
    engine = NativeThreadEngine(THREADS, calls)
    with pytest.raises(KeyboardInterrupt):
        engine.read(file, buffer, pages(4096))
    buffer[:] = 0
    time.sleep(0.05)
    assert not buffer.any()
    reads = pages(40)
    np.testing.assert_array_equal(brought(engine, file, reads), right(content, reads))
    # Nobody counts the interrupted one as under way.
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        brought(engine, file, reads)


def test_closing_waits_for_a_batch(file, content):
    entered, ended, came = threading.Event(), threading.Event(), []

    class Slow(DriveCalls):
        def read_many(self, *args):
            entered.set()
            time.sleep(0.05)
            results = super().read_many(*args)
            ended.set()
            return results

    engine, reads = NativeThreadEngine(THREADS, Slow()), pages(40)
    reader = threading.Thread(target=lambda: came.append(brought(engine, file, reads)))
    reader.start()
    assert entered.wait(120)
    engine.close()
    assert ended.is_set()
    reader.join()
    np.testing.assert_array_equal(came[0], right(content, reads))


def test_a_child_of_a_fork_has_threads_of_its_own(file, content):
    reads = pages(100)
    engine = NativeThreadEngine(THREADS, DriveCalls())
    brought(engine, file, reads)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            same = np.array_equal(brought(engine, file, reads), right(content, reads))
            code = 0 if same and threads_of_the_process() >= THREADS else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(brought(engine, file, reads), right(content, reads))
    engine.close()


def test_batches_of_different_widths_share_the_threads(file, content):
    wrong = []

    def use(width):
        engine = NativeThreadEngine(width, DriveCalls())
        for turn in range(30):
            reads = pages(1 + turn * width % 60, turn)
            if not np.array_equal(brought(engine, file, reads), right(content, reads)):
                wrong.append(width)
        engine.close()

    users = [threading.Thread(target=use, args=(width,)) for width in (1, 2, 3, 7, 20, 40)]
    for one in users:
        one.start()
    for one in users:
        one.join()
    assert not wrong
