# SPDX-License-Identifier: Apache-2.0
"""Read engines: bring many pieces of files into memory at once, by threads or io_uring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.shared_files import ReadFile

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


# --- Threads of Python ---


class ThreadEngine:
    """A `ReadEngine` of ordinary reads, one at a time in each of several threads.

    Parameters
    ----------
    threads
        Reads in flight.
    """

    name = "threads"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hillinfer-read")

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""
        view = buffer.data

        def read_share(share: int) -> None:
            for i in range(share, len(reads), self._threads):
                at, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
                file.read(view[at : at + count], int(reads.file_offsets[i]))

        if len(reads) <= 1:
            read_share(0)
            return
        shares = min(self._threads, len(reads))
        running = [self._pool.submit(read_share, share) for share in range(shares)]
        # All of them, before any error or interrupt goes on: a read still under way would fill the
        # buffer of the next.
        try:
            wait(running)
        except BaseException:
            wait(running)
            raise
        for one in running:
            one.result()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)


# --- Threads of the native library ---


class NativeThreadEngine:
    """A `ReadEngine` of ordinary reads, one at a time in each of several threads without Python.

    Threads of Python take turns at its lock, which costs about half of a drive's small reads. These
    threads are the process's, shared by all engines, and stay. What does not come whole is read
    again the ordinary way, which knows how to go on and what to say.

    Parameters
    ----------
    threads
        Reads in flight of one batch.
    calls
        How the drive is reached.
    again
        Reads what did not come whole, and is closed with this; threads of Python where None.
    """

    # A choice names how reads are made, and that is the same.
    name = ThreadEngine.name

    def __init__(self, threads: int, calls: DriveCalls, again: ReadEngine | None = None) -> None:
        self._threads = threads
        self._calls = calls
        self._gate = EngineGate()
        self._plain = ThreadEngine(threads) if again is None else again

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""

        def read() -> None:
            missing = file.lend(lambda descriptor: self._missing(descriptor, buffer, reads))
            if len(missing):
                self._plain.read(file, buffer, reads.only(missing))

        self._gate.let_through(read)

    def close(self) -> None:
        """Wait for reads under way."""
        self._gate.close()
        self._plain.close()

    def _missing(
        self, descriptor: int, buffer: NDArray[np.uint8], reads: Reads
    ) -> NDArray[np.int64]:
        """Return the numbers of the reads that did not come whole."""
        try:
            # One call: an interrupt is seen when it has returned, and nothing is under way.
            results = self._calls.read_many(descriptor, reads, buffer.ctypes.data, self._threads)
        except OSError:
            return np.arange(len(reads))
        every, told = np.arange(len(reads)), np.array(results, np.int64)
        came = self._calls.reads_done(descriptor, buffer, reads, every, told)
        return np.flatnonzero(came != reads.byte_counts)
