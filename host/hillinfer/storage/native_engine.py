# SPDX-License-Identifier: Apache-2.0
"""Reads shared out among threads of the native library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.engine_gate import EngineGate
from hillinfer.storage.reads import Reads
from hillinfer.storage.stored_base import ReadFile
from hillinfer.storage.thread_engine import ThreadEngine


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
    """

    # A choice names how reads are made, and that is the same.
    name = ThreadEngine.name

    def __init__(self, threads: int, calls: DriveCalls) -> None:
        self._threads = threads
        self._calls = calls
        self._gate = EngineGate()
        self._plain = ThreadEngine(threads)

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
