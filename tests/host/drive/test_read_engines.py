# SPDX-License-Identifier: Apache-2.0
"""Both read engines bring the same bytes, whatever the drive and the kernel do."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_cases import SKIP, kernel_permits_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from read_cases import PAGES, brought

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.engine_table import UringEngine, open_engine, why_no_ring
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.errors import ColdPoolError, SettingsError
from hillinfer.settings import IOChoice

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from faulty_calls import FAULTS, Fault, FaultyCalls, Injection
from single_reads import SingleReads

THREADS = 3


@pytest.fixture(params=IOMode)
def file(request, tmp_path, content):
    made = make_file(tmp_path, content, request.param)
    yield made
    made.close()


@pytest.fixture
def rings():
    if not kernel_permits_rings():
        pytest.skip(SKIP)


def make_file(directory, content, mode=None, calls=None):
    best = probe_io_mode(directory)
    if mode is IOMode.DIRECT and best is not IOMode.DIRECT:
        pytest.skip(f"the file system of {directory} has no direct I/O: set --basetemp to a drive")
    made = ColdFile(directory, mode or best, "rows of layer 4", calls)
    made.write(content.data, 0)
    return made


@contextmanager
def opened(engine):
    try:
        yield engine
    finally:
        engine.close()


def scattered(seed, count, most_pages=4):
    """Reads of some pages each, in any order, packed in the buffer one behind the other."""
    chance = np.random.default_rng(seed)
    sizes = chance.integers(1, most_pages + 1, count)
    offsets = chance.integers(0, PAGES - most_pages, count)
    places = np.cumsum(sizes) - sizes
    return Reads(*(one.astype(np.int64) * PAGE_BYTES for one in (offsets, places, sizes)))


def expected(content, reads):
    into = np.zeros(int(reads.byte_counts.sum()), np.uint8)
    for offset, place, size in zip(
        reads.file_offsets, reads.buffer_offsets, reads.byte_counts, strict=True
    ):
        into[place : place + size] = content[offset : offset + size]
    return into


def open_files():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_any_reads_bring_the_bytes_of_the_file(engine_choice, file, content):
    with opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine:

        @settings(max_examples=15, deadline=None)
        @given(seed=st.integers(0, 2**32), count=st.integers(0, 200), most=st.integers(1, 40))
        def check(seed, count, most):
            reads = scattered(seed, count, most)
            np.testing.assert_array_equal(brought(engine, file, reads), expected(content, reads))

        check()


def test_a_byte_that_differs_is_seen(engine_choice, file, content):
    changed = content.copy()
    changed[7 * PAGE_BYTES + 11] ^= 1
    reads = Reads(np.array([7 * PAGE_BYTES]), np.array([0]), np.array([PAGE_BYTES]))
    with opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine:
        came = brought(engine, file, reads)
        assert np.flatnonzero(came != expected(changed, reads)).tolist() == [11]


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_more_reads_than_a_ring_holds(rings, file, content, depth):
    with opened(UringEngine(1, DriveCalls(), depth)) as engine:
        for seed in range(4):
            reads = scattered(seed, 3 * depth + seed)
            np.testing.assert_array_equal(brought(engine, file, reads), expected(content, reads))


def test_nothing_outside_the_places_asked_for_is_touched(engine_choice, file, content):
    reads = Reads(np.array([0, 9 * PAGE_BYTES]), np.array([4096, 16384]), np.array([4096, 8192]))
    buffer = aligned_buffer(8 * PAGE_BYTES)
    buffer[:] = 0xA5
    with opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine:
        engine.read(file, buffer, reads)
    for place in (0, 8192, 12288, 24576, 28672):
        assert (buffer[place : place + PAGE_BYTES] == 0xA5).all()
    np.testing.assert_array_equal(buffer[16384:24576], content[9 * 4096 : 11 * 4096])


class TestFaults:
    @pytest.mark.parametrize("index", [0, 5, None])
    @pytest.mark.parametrize(
        ("kind", "fault"),
        [(kind, fault) for kind in ("read_done", "ring_enter") for fault in FAULTS[kind]],
    )
    def test_what_a_ring_does_not_bring_is_read_again(
        self, rings, file, content, kind, fault, index
    ):
        if kind == "ring_enter" and index == 5:
            index = 1
        calls = FaultyCalls(Injection(kind, index, fault), delay_seconds=0.001)
        reads = scattered(1, 40)
        with opened(UringEngine(THREADS, calls, depth=8)) as engine:
            came = brought(engine, file, reads)
        assert calls.hits >= 1
        np.testing.assert_array_equal(came, expected(content, reads))

    @pytest.mark.parametrize("index", [0, None])
    @pytest.mark.parametrize("fault", [Fault.SHORT, Fault.DELAY])
    def test_threads_go_on_by_themselves(self, tmp_path, content, fault, index):
        calls = FaultyCalls(Injection("preadv", index, fault), delay_seconds=0.001)
        file, reads = make_file(tmp_path, content, None, calls), scattered(1, 40)
        with opened(open_engine(IOChoice.THREADS, THREADS, calls)) as engine:
            np.testing.assert_array_equal(brought(engine, file, reads), expected(content, reads))
        file.close()

    def test_the_error_names_file_and_place(self, engine_choice, tmp_path, content):
        class Failing(SingleReads):
            def preadv(self, descriptor, into, offset):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            def read_done(self, descriptor, into, offset, result):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        file, reads = make_file(tmp_path, content, None, Failing()), scattered(1, 12)
        with (
            opened(open_engine(engine_choice, THREADS, Failing())) as engine,
            pytest.raises(
                ColdPoolError, match=r"could not read \d+ bytes at \d+ of rows of layer 4 .*Input"
            ),
        ):
            brought(engine, file, reads)
        file.close()

    def test_a_file_that_lost_its_end_is_told(self, engine_choice, file):
        os.truncate(f"/proc/self/fd/{file.descriptor}", (PAGES - 50) * PAGE_BYTES)
        at = (PAGES - 52) * PAGE_BYTES
        reads = Reads(np.array([0, at]), np.array([0, 4096]), np.array([4096, 16384]))
        with (
            opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine,
            pytest.raises(ColdPoolError, match=rf"16384 bytes at {at} .*bytes long and should be"),
        ):
            brought(engine, file, reads)

    @pytest.mark.parametrize("fault", FAULTS["ring_open"])
    def test_where_no_ring_is_to_be_had_threads_read(self, rings, file, content, fault):
        if fault is Fault.DELAY:
            return
        calls = FaultyCalls(Injection("ring_open", None, fault))
        assert why_no_ring(calls)
        with pytest.raises(SettingsError, match=r"no io_uring, .*choose --io auto or --io threads"):
            open_engine(IOChoice.URING, 1, calls)
        with opened(open_engine(IOChoice.AUTO, THREADS, calls)) as engine:
            assert engine.name == "threads"
            reads = scattered(1, 40)
            np.testing.assert_array_equal(brought(engine, file, reads), expected(content, reads))

    def test_a_thread_that_gets_no_ring_reads_without(self, rings, file, content):
        calls = FaultyCalls(Injection("ring_open", 1, Fault.ENOMEM))
        reads, came = scattered(1, 40), []
        with opened(UringEngine(THREADS, calls)) as engine:
            other = threading.Thread(target=lambda: came.append(brought(engine, file, reads)))
            other.start()
            other.join()
        assert calls.hits == 1
        np.testing.assert_array_equal(came[0], expected(content, reads))

    def test_reads_that_never_come_back_end_it(self, rings):
        class Stuck(SingleReads):
            def ring_enter(self, ring, submit, complete):
                # Where it waited for them, it would wait for ever.
                if submit == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().ring_enter(ring, submit, 0)

        # Nobody writes into this pipe: every drive, however fast, is slower than the test.
        end, other_end = os.pipe()
        file = SimpleNamespace(lend=lambda use: use(end))
        try:
            with opened(UringEngine(1, Stuck(), depth=8)) as engine:
                for _ in range(2):
                    with pytest.raises(ColdPoolError, match=r"not give back reads .*--io threads"):
                        brought(engine, file, scattered(1, 40))
        finally:
            os.close(end)
            os.close(other_end)

    def test_an_interrupt_is_told_once_all_reads_came(self, rings):
        """Ctrl-C while the kernel waits for a drive: nobody may have the memory before."""
        end, other_end = os.pipe()
        file = SimpleNamespace(lend=lambda use: use(end))
        buffer, interrupted = aligned_buffer(8 * PAGE_BYTES), []
        reads = Reads(*(np.arange(8) * PAGE_BYTES,) * 2, np.full(8, PAGE_BYTES))

        def interrupt_and_write():
            time.sleep(0.1)
            interrupted.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
            for page in range(8):
                os.write(other_end, bytes([page + 1]) * PAGE_BYTES)

        writer = threading.Thread(target=interrupt_and_write)
        with opened(UringEngine(1, DriveCalls(), depth=8)) as engine:
            writer.start()
            with pytest.raises(KeyboardInterrupt):
                engine.read(file, buffer, reads)
            assert time.monotonic() - interrupted[0] >= 0.1
            # What was read before the interrupt could be told, whatever page came to which read.
            assert sorted(buffer.reshape(8, -1)[:, 0].tolist()) == list(range(1, 9))
        writer.join()
        os.close(end)
        os.close(other_end)


class TestLife:
    def test_threads_use_one_engine_at_once(self, engine_choice, file, content):
        wrong, done = [], []

        def use(seed):
            for turn in range(8):
                reads = scattered(100 * seed + turn, 30)
                if not np.array_equal(brought(engine, file, reads), expected(content, reads)):
                    wrong.append(seed)
            done.append(seed)

        with opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine:
            threads = [threading.Thread(target=use, args=(seed,)) for seed in range(24)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert (wrong, sorted(done)) == ([], list(range(24)))

    def test_a_thread_takes_its_ring_along(self, rings, file):
        with opened(UringEngine(1, DriveCalls())) as engine:
            before = open_files()
            for _ in range(20):
                one = threading.Thread(target=brought, args=(engine, file, scattered(1, 4)))
                one.start()
                one.join()
            assert open_files() == before

    def test_nothing_stays_open(self, engine_choice, file):
        with opened(open_engine(engine_choice, THREADS, DriveCalls())) as engine:
            brought(engine, file, scattered(1, 4))
        before, threads = open_files(), threading.active_count()
        for _ in range(30):
            engines = [open_engine(engine_choice, THREADS, DriveCalls()) for _ in range(3)]
            for engine in engines:
                brought(engine, file, scattered(1, 20))
            for engine in engines:
                engine.close()
                engine.close()
        del engine, engines
        assert (open_files(), threading.active_count()) == (before, threads)

    def test_an_engine_that_is_dropped_gives_its_ring_back(self, rings, file):
        before = open_files()
        brought(UringEngine(1, DriveCalls()), file, scattered(1, 20))
        assert open_files() == before

    def test_a_setup_that_breaks_off_leaves_nothing_open(self, rings):
        """In a process of its own, which has room for the descriptor and not for the maps."""
        program = textwrap.dedent(
            """
            import os, resource
            from hillinfer.drive.calls import DriveCalls
            calls = DriveCalls()
            calls.ring_close(calls.ring_open(64))
            before = os.listdir("/proc/self/fd")
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1, most))
            try:
                calls.ring_open(64)
            except OSError as error:
                told = error.errno
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            print(told, len(os.listdir("/proc/self/fd")) - len(before))
            """
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [str(errno.ENOMEM), "0"]

    def test_closing_waits_for_reads_in_flight(self, rings, file, content):
        entered, came = threading.Event(), []

        class Slow(SingleReads):
            def ring_enter(self, ring, submit, complete):
                taken = super().ring_enter(ring, submit, 0)
                entered.set()
                time.sleep(0.05)
                return taken

        reads = scattered(1, 30)
        engine = UringEngine(1, Slow(), depth=8)
        reader = threading.Thread(target=lambda: came.append(brought(engine, file, reads)))
        reader.start()
        assert entered.wait(120)
        engine.close()
        reader.join()
        np.testing.assert_array_equal(came[0], expected(content, reads))
        with pytest.raises(RuntimeError, match="closed"):
            brought(engine, file, reads)

    def test_a_child_of_a_fork_makes_a_ring_of_its_own(self, rings, file, content):
        class Counted(DriveCalls):
            rings = 0

            def ring_open(self, depth):
                self.rings += 1
                return super().ring_open(depth)

        reads, calls = scattered(1, 30), Counted()
        with opened(UringEngine(1, calls)) as engine:
            brought(engine, file, reads)
            assert calls.rings == 1
            child = os.fork()
            if child == 0:
                code = 2
                try:
                    right = np.array_equal(brought(engine, file, reads), expected(content, reads))
                    code = 0 if right and calls.rings == 2 else 1
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            np.testing.assert_array_equal(brought(engine, file, reads), expected(content, reads))
            assert calls.rings == 1


def test_io_uring_is_taken_where_the_kernel_permits_it(rings):
    assert why_no_ring(DriveCalls()) is None
    for choice, name in zip(IOChoice, ("uring", "uring", "threads"), strict=True):
        with opened(open_engine(choice, 1, DriveCalls())) as engine:
            assert engine.name == name


def test_a_program_may_end_while_a_thread_reads_in_a_ring(rings):
    """What the thread waits for comes while the program ends, once rings were let go."""
    program = textwrap.dedent(
        """
        import os, sys, threading, weakref
        from types import SimpleNamespace
        import numpy as np
        from hillinfer.drive.calls import Reads
        from hillinfer.drive.engine_table import UringEngine
        from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
        sys.path.insert(0, sys.argv[1])
        from single_reads import SingleReads

        class Keeper:
            pass

        class Telling(SingleReads):
            def ring_enter(self, ring, submit, complete):
                entered.set()
                return super().ring_enter(ring, submit, complete)

        def end():
            os.write(other_end, bytes(range(1, 9)) * PAGE_BYTES)
            reader.join(120)
            print(int(buffer.astype(np.int64).sum()), flush=True)

        entered, keeper = threading.Event(), Keeper()
        ending, other_end = os.pipe()
        file = SimpleNamespace(lend=lambda use: use(ending))
        buffer = aligned_buffer(8 * PAGE_BYTES)
        reads = Reads(*(np.arange(8) * PAGE_BYTES,) * 2, np.full(8, PAGE_BYTES))
        # Of those that are called at the end the last one made comes first.
        weakref.finalize(keeper, end)
        engine = UringEngine(1, Telling(), depth=8)
        reader = threading.Thread(target=engine.read, args=(file, buffer, reads), daemon=True)
        reader.start()
        assert entered.wait(120)
        """
    )
    faults = str(Path(__file__).parents[1] / "faults")
    done = subprocess.run(
        [sys.executable, "-c", program, faults], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == sum(range(1, 9)) * PAGE_BYTES
