# SPDX-License-Identifier: Apache-2.0
"""Reads through io_uring, many in flight from one thread."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import ColdPoolError
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.engine_gate import EngineGate
from hillinfer.storage.io_ring import IORing
from hillinfer.storage.reads import Reads
from hillinfer.storage.stored_base import ReadFile
from hillinfer.storage.thread_engine import ThreadEngine

DEPTH = 64
# How often, and how far apart in seconds, a ring is asked again for reads that it does not return.
_TRIES, _PAUSE = 50, 0.02


class UringEngine:
    """A `ReadEngine` with one ring for each thread that reads.

    What a ring does not bring whole (a short read, an error, a ring that cannot be had) is read
    again the ordinary way, which knows how to go on and what to say.

    Parameters
    ----------
    threads
        Reads in flight where a ring does not serve.
    calls
        How the drive is reached.
    depth
        Reads in flight in a ring, a power of two.

    Raises
    ------
    OSError
        Where the kernel gives this thread no ring.
    """

    name = "uring"

    def __init__(self, threads: int, calls: DriveCalls, depth: int = DEPTH) -> None:
        self._calls = calls
        self._depth = depth
        self._local = threading.local()
        # Rings of threads that ended are gone from here.
        self._rings: weakref.WeakSet[IORing] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._gate = EngineGate()
        self._lost: list[NDArray[np.uint8]] = []
        self._ring()
        self._plain = ThreadEngine(threads)

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""

        def read() -> None:
            missing = file.lend(lambda descriptor: self._through_ring(descriptor, buffer, reads))
            if len(missing):
                self._plain.read(file, buffer, reads.only(missing))

        self._gate.let_through(read)

    def close(self) -> None:
        """Wait for reads under way and give all rings back."""
        self._gate.close()
        with self._changing:
            for ring in self._rings:
                ring.close()
        self._plain.close()

    def _ring(self) -> IORing:
        ring: IORing | None = getattr(self._local, "ring", None)
        # A child of a fork that used its parent's ring would take away the parent's reads.
        if ring is None or ring.is_inherited:
            ring = self._local.ring = IORing(self._depth, self._calls)
            with self._changing:
                self._rings.add(ring)
        return ring

    def _through_ring(
        self, descriptor: int, buffer: NDArray[np.uint8], reads: Reads
    ) -> NDArray[np.int64]:
        """Return the numbers of the reads that did not come whole."""
        if self._lost:
            raise ColdPoolError(_LOST)
        whole = np.zeros(len(reads), bool)
        try:
            ring = self._ring()
        except OSError:
            return np.flatnonzero(~whole)
        # Nothing is left, but for a second interrupt while the first one waited.
        self._drain(ring, buffer)
        try:
            self._exchange(ring, descriptor, buffer, reads, whole)
        finally:
            # Also after an interrupt: a read still under way would fill the buffer of the next.
            self._drain(ring, buffer)
        return np.flatnonzero(~whole)

    def _exchange(
        self,
        ring: IORing,
        descriptor: int,
        buffer: NDArray[np.uint8],
        reads: Reads,
        whole: NDArray[np.bool_],
    ) -> None:
        addresses = reads.buffer_offsets + buffer.ctypes.data
        pushed, count = 0, len(reads)
        while pushed < count or ring.in_flight:
            more = min(ring.depth - ring.in_flight - ring.queued, count - pushed)
            if more:
                part = slice(pushed, pushed + more)
                tags = np.arange(pushed, pushed + more)
                ring.push(
                    descriptor,
                    addresses[part],
                    reads.file_offsets[part],
                    reads.byte_counts[part],
                    tags,
                )
                pushed += more
            under_way = ring.in_flight + ring.queued
            try:
                # Half of them, so that the drive has the other half while new ones are made.
                ring.enter(under_way if pushed == count else max(1, under_way // 2))
            except InterruptedError:
                pass
            except OSError:
                # Too much for the kernel now: what it did not take is read the ordinary way.
                ring.retract()
                return
            done, results = ring.reap()
            came = self._calls.reads_done(descriptor, buffer, reads, done, results)
            whole[done] = came == reads.byte_counts[done]

    def _drain(self, ring: IORing, buffer: NDArray[np.uint8]) -> None:
        """Wait until the ring is empty; what comes is not looked at."""
        ring.retract()
        for _ in range(_TRIES):
            if not ring.in_flight:
                return
            try:
                ring.enter(ring.in_flight)
            except InterruptedError:
                pass
            except OSError:
                time.sleep(_PAUSE)
            ring.reap()
        if ring.in_flight:
            # The kernel may still write there: nobody may have this memory for anything else.
            self._lost.append(buffer)
            raise ColdPoolError(_LOST)


_LOST = (
    "io_uring did not give back reads of the cold pool that it had taken; "
    "choose --io threads (io in Python)"
)
