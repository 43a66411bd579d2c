# SPDX-License-Identifier: Apache-2.0
"""Read engines: bring many pieces of files into memory at once, by threads or io_uring."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer
from hillinfer.drive.landing import MAX_READ_BYTES, FileRows, Landed, LandingTable
from hillinfer.drive.shared_files import ReadFile
from hillinfer.errors import ColdPoolError
from hillinfer.native.library import LOST, native_library
from hillinfer.native.signatures import Awaited, LandingErrand
from hillinfer.native.structures import ReadWay

# --- The interface ---


class ReadEngine(Protocol):
    """Makes many reads at once; any thread may use it at any time."""

    name: str
    """As in the table of engines."""

    @property
    def in_library(self) -> NativeThreadEngine | None:
        """Itself where calls of the library may make its reads; None where Python makes them."""
        ...

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads, or raise the file's error naming file, offset and bytes.

        Whatever happens, no read is under way any more when it returns or raises.

        Parameters
        ----------
        file
            Which file.
        buffer
            uint8, one contiguous stretch.
        reads
            Where the bytes lie and where in the buffer they go.
        """
        ...

    def land(self, file: ReadFile, wanted: FileRows) -> Landed:
        """Bring rows of a file to their places, or raise as `read` does.

        Planned, read, copied out and compared with their checksums without Python. Rows that are
        not as they were written are told and no error.

        Raises
        ------
        IndexError
            A row has no place, or no checksum.
        """
        ...

    def close(self) -> None:
        """Wait for reads under way and give threads and rings back; harmless when done twice."""
        ...


# --- Open and closed ---

Result = TypeVar("Result")


class EngineGate:
    """Lets reads through until it is closed; closing waits for those under way."""

    def __init__(self) -> None:
        self._changing = threading.Condition()
        self._reading = 0
        self._closed = False

    def let_through(self, read: Callable[[], Result]) -> Result:
        """Read, counted for as long as it is under way, and return what that returns.

        No context manager: an interrupt between its own frames would leave the read counted for as
        long as the traceback lives, and whoever closes meanwhile would wait for it.

        Raises
        ------
        RuntimeError
            After closing.
        """
        entered = False
        try:
            with self._changing:
                if self._closed:
                    raise RuntimeError("this engine is closed")
                self._reading += 1
                entered = True
            return read()
        finally:
            if entered:
                with self._changing:
                    self._reading -= 1
                    self._changing.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait until nobody reads; harmless when done twice."""
        with self._changing:
            self._closed = True
            self._changing.wait_for(lambda: not self._reading)


# --- Threads of the native library ---


class NativeThreadEngine:
    """A `ReadEngine` of ordinary reads, one at a time in each of several threads without Python.

    These threads are the process's, shared by all engines, and stay. What does not come whole is
    read again the ordinary way, which knows how to go on and what to say.

    Parameters
    ----------
    threads
        Reads in flight of one batch.
    calls
        How the drive is reached.
    """

    name = "threads"

    def __init__(self, threads: int, calls: DriveCalls) -> None:
        self._threads = threads
        self._calls = calls
        # Reads in flight in a ring of its own of whatever lands rows beside its caller.
        self._depth = 0
        self._gate = EngineGate()
        # What a ring may still write to: nobody may have this memory for anything else.
        self._lost: list[object] = []

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""

        def use(descriptor: int) -> NDArray[np.int64]:
            way = self._way(descriptor)
            # One call: an interrupt is seen when it has returned, and nothing is under way.
            results = self._calls.read_many(way, reads, buffer.ctypes.data)
            if results is None:
                raise self.losing(buffer)
            return np.flatnonzero(results != reads.byte_counts)

        def read() -> None:
            view = buffer.data
            for i in file.lend(use).tolist():
                at, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
                file.read(view[at : at + count], int(reads.file_offsets[i]))

        self._gate.let_through(read)

    def land(self, file: ReadFile, wanted: FileRows) -> Landed:
        """Bring rows to their places; see `ReadEngine`."""
        landing = LandingTable(wanted)
        table = landing.table

        def use(descriptor: int) -> None:
            if not self._calls.land(self._way(descriptor), table):
                raise self.losing(landing)

        def read() -> Landed:
            while table.landed < table.count:
                file.lend(use)
                if table.missing:
                    for into, offset in landing.missing():
                        file.read(into, offset)
            return landing.landed

        return self._gate.let_through(read)

    @property
    def in_library(self) -> NativeThreadEngine | None:
        """Itself; None where somebody looks at reads, in the thread that makes them."""
        is_seen = self._calls.watch is not None or type(self._calls).land is not DriveCalls.land
        return None if is_seen else self

    def lander(self) -> RowLander:
        """Return a thread that lands rows beside its caller, to be closed before this."""
        return RowLander(self, _DEEPER * self._depth)

    def land_by(self, file: ColdFile, memory: object, call: Callable[[ReadWay], int]) -> int:
        """Return the outcome of a call of the library that lands rows of a file, told how.

        `memory` is what it reads to; raises as `land` does where a ring keeps it.
        """
        outcome = self._gate.let_through(lambda: file.lend(lambda own: call(self._way(own))))
        if outcome == LOST:
            raise self.losing(memory)
        return outcome

    def close(self) -> None:
        """Wait for reads under way."""
        self._gate.close()

    def _ring(self) -> int | None:
        """Return the ring of the calling thread, None where threads read."""
        return None

    def way(self, descriptor: int) -> ReadWay:
        """Return how a file is read, without a ring."""
        return ReadWay(None, self._calls.watch, descriptor, self._threads)

    def losing(self, memory: object) -> ColdPoolError:
        """Keep memory that is still written to for ever, and return the error that says so."""
        self._lost.append(memory)
        return ColdPoolError(_LOST)

    def _way(self, descriptor: int) -> ReadWay:
        if self._lost:
            raise ColdPoolError(_LOST)
        way = self.way(descriptor)
        way.ring = self._ring()
        return way


# A thread that reads beside others that compute wakes less often with more reads in flight.
_DEEPER = 4
_LOST = (
    "io_uring did not give back reads of the cold pool that it had taken; "
    "choose --io threads (io in Python)"
)

# --- Rows that land beside their caller ---


class ComingRows(Protocol):
    """Rows on their way to a buffer."""

    def result(self) -> Landed:
        """Return what it took, once they are there; raises what went wrong."""
        ...

    def settle(self) -> None:
        """Wait until nothing is under way, whatever came of it."""
        ...


class LandingInPython:
    """Rows that a thread of Python's brings: so that somebody sees each read."""

    def __init__(self, landed: Future[Landed]) -> None:
        self._landed = landed

    def result(self) -> Landed:
        """Return what it took; see `ComingRows`."""
        return self._landed.result()

    def settle(self) -> None:
        """Wait; see `ComingRows`."""
        if not self._landed.cancel():
            self._landed.exception()


class LandingAhead:
    """Rows that a thread of the native library lands.

    Parameters
    ----------
    engine
        Whose file it is, and who brings what does not come.
    thread
        Address of the library's thread.
    begun
        Keeps what is under way.
    file, wanted
        Of the rows.

    Attributes
    ----------
    thread
        As given: a number that no other thread has.
    """

    def __init__(
        self,
        engine: NativeThreadEngine,
        thread: int,
        begun: set[LandingAhead],
        file: ColdFile,
        wanted: FileRows,
    ) -> None:
        self._engine = engine
        self.thread = thread
        self._begun = begun
        self._file = file
        self._wanted = wanted
        self._landing = LandingTable(wanted)
        self._library = native_library()
        address = ctypes.addressof(self._landing.table)
        self._errand = LandingErrand(engine.way(file.descriptor), address, is_done=1)
        self._awaited: Awaited | None = None

    def begin(self) -> None:
        """Begin; `settle` or `result` must follow before the file is closed."""
        self._begun.add(self)
        self._library.call_holding("hillinfer_lander_begin", self.thread, self._errand)

    def begin_first(self) -> None:
        """Begin before those that nobody waits for, whatever is under way; as `begin` otherwise."""
        self._begun.add(self)
        self._library.call_holding("hillinfer_lander_begin_first", self.thread, self._errand)

    def settle(self) -> None:
        """Wait until nothing is under way; harmless when done twice, or before `begin`."""
        # Whoever closed the thread has waited, and it is gone.
        if self in self._begun:
            if self._awaited is None or not self._awaited.is_over:
                self._library.functions.hillinfer_lander_wait(self.thread, self._errand)
            self._begun.discard(self)

    @property
    def awaited(self) -> Awaited | None:
        """What a call of the library is told that is to wait for it; None where nobody need."""
        if self not in self._begun:
            return None
        if self._awaited is None:
            self._awaited = Awaited(self.thread, ctypes.addressof(self._errand))
        return self._awaited

    def result(self) -> Landed:
        """Return what it took, once all rows are there; raises as `ReadEngine.land` does."""
        self.settle()
        if not self._library.has_landed(self._errand.outcome):
            raise self._engine.losing(self._landing)
        table = self._landing.table
        if table.landed < table.count:
            # What came of the last reads is gone: the thread uses their buffer again.
            # A small one: nobody counts it.
            size = max(self._wanted.row_bytes, MAX_READ_BYTES) + 2 * PAGE_BYTES
            buffer = aligned_buffer(min(len(self._wanted.buffer), size))
            return self._engine.land(self._file, replace(self._wanted, buffer=buffer))
        return self._landing.landed

    @property
    def times(self) -> tuple[int, int]:
        """When the thread began and ended, in the nanoseconds of `perf_counter_ns`."""
        return int(self._errand.started_ns), int(self._errand.stopped_ns)


class RowLander:
    """A thread of the native library that lands rows, one landing after the other.

    Nothing of it takes Python's global lock, which a thread of Python's would wait for twice.

    Parameters
    ----------
    engine
        Whose reads these are.
    depth
        Reads in flight in a ring of its own; with 0 threads read.
    """

    def __init__(self, engine: NativeThreadEngine, depth: int) -> None:
        library = native_library()
        self._engine = engine
        self._thread = library.make("hillinfer_lander_open", depth)
        self._begun: set[LandingAhead] = set()
        close = library.closing("hillinfer_lander_close")
        # Ends what was begun, whose memory stays until then; does nothing the second time.
        self.close = weakref.finalize(self, _end, close, self._thread, self._begun)

    def hold(self) -> None:
        """Let those that nobody waits for stand still, until `go_on` or until somebody waits."""
        self._tell_held(1)

    def go_on(self) -> None:
        """Take a `hold` back."""
        self._tell_held(0)

    def _tell_held(self, held: int) -> None:
        if self.close.alive:
            # In a microsecond: who lets go of Python's lock may wait for it longer.
            native_library().tables.hillinfer_lander_hold(self._thread, held)

    def ahead(self, file: ColdFile, wanted: FileRows) -> LandingAhead:
        """Return rows of a file that are to land, and that nobody has begun."""
        return LandingAhead(self._engine, self._thread, self._begun, file, wanted)


def _end(close: Callable[[int], None], thread: int, begun: set[LandingAhead]) -> None:
    close(thread)
    begun.clear()


def lander_of(engine: ReadEngine) -> RowLander | None:
    """Return a thread that lands rows, to be closed before the engine; None where it has none."""
    own = engine.in_library
    return None if own is None else own.lander()
