# SPDX-License-Identifier: Apache-2.0
"""Read engines: bring many pieces of files into memory at once, by threads or io_uring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.landing import FileRows, Landed, LandingTable
from hillinfer.drive.shared_files import ReadFile
from hillinfer.errors import ColdPoolError
from hillinfer.native.structures import ReadWay

# --- The interface ---


class ReadEngine(Protocol):
    """Makes many reads at once; any thread may use it at any time."""

    name: str
    """As in the table of engines."""

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


class EngineGate:
    """Lets reads through until it is closed; closing waits for those under way."""

    def __init__(self) -> None:
        self._changing = threading.Condition()
        self._reading = 0
        self._closed = False

    def let_through(self, read: Callable[[], None]) -> None:
        """Read, counted for as long as it is under way.

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
            read()
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
                raise self._losing(buffer)
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
                raise self._losing(landing)

        def read() -> None:
            while table.landed < table.count:
                file.lend(use)
                if table.missing:
                    for into, offset in landing.missing():
                        file.read(into, offset)

        self._gate.let_through(read)
        return landing.landed

    def close(self) -> None:
        """Wait for reads under way."""
        self._gate.close()

    def _ring(self) -> int | None:
        """Return the ring of the calling thread, None where threads read."""
        return None

    def _way(self, descriptor: int) -> ReadWay:
        if self._lost:
            raise ColdPoolError(_LOST)
        return ReadWay(self._ring(), self._calls.watch, descriptor, self._threads)

    def _losing(self, memory: object) -> ColdPoolError:
        self._lost.append(memory)
        return ColdPoolError(_LOST)


_LOST = (
    "io_uring did not give back reads of the cold pool that it had taken; "
    "choose --io threads (io in Python)"
)
