# SPDX-License-Identifier: Apache-2.0
"""Reads through io_uring: many in flight from one thread."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.read_engines import EngineGate, ThreadEngine
from hillinfer.drive.shared_files import ReadFile
from hillinfer.errors import ColdPoolError

# --- io_uring's queues ---

_SUBMISSION = np.dtype(
    {
        "names": ["opcode", "descriptor", "offset", "address", "length", "tag"],
        "formats": ["u1", "<i4", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_OP_READ = 22
# One thread hands reads over, and completions are written while that thread waits for them and at
# no other time: no other memory order is needed than the system call's.
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_SINGLE_MMAP = 1 << 0
_SUBMISSIONS_AT = 0x10000000
_WORD = 0xFFFFFFFF
# Words of the parameters: where the kernel says what it made.
_ENTRIES, _FLAGS, _FEATURES, _SQ, _CQ, _WORDS = 0, 2, 5, 10, 20, 30


class IORing:
    """One ring: the thread that made it hands reads over and takes them back in any order.

    Parameters
    ----------
    depth
        Most reads in flight, a power of two.
    calls
        How the kernel is reached.

    Raises
    ------
    OSError
        Where the kernel has no io_uring, an old one (before Linux 6.1), or forbids it.
    """

    def __init__(self, depth: int, calls: DriveCalls) -> None:
        self._calls = calls
        self._process = os.getpid()
        parameters = np.zeros(_WORDS, np.uint32)
        parameters[_FLAGS] = _SINGLE_ISSUER | _DEFER_TASKRUN
        self._descriptor = calls.ring_open(depth, parameters)
        # A thread that ends takes its ring along.
        self._closing = weakref.finalize(self, _close, calls, self._descriptor)
        try:
            self._map(parameters)
        except BaseException:
            self._closing()
            raise
        self.depth = depth

    def _map(self, parameters: NDArray[np.uint32]) -> None:
        if not int(parameters[_FEATURES]) & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "io_uring of this kernel is too old")
        words = parameters.tolist()
        entries, completions = words[_ENTRIES : _ENTRIES + 2]
        sq_head, sq_tail, _, _, _, _, sq_array = words[_SQ : _SQ + 7]
        cq_head, cq_tail, _, _, _, cq_entries = words[_CQ : _CQ + 6]
        self._sq_mask, self._cq_mask = entries - 1, completions - 1
        size = max(sq_array + 4 * entries, cq_entries + _COMPLETION.itemsize * completions)
        queues = mmap.mmap(self._descriptor, size)
        slots = mmap.mmap(self._descriptor, entries * _SUBMISSION.itemsize, offset=_SUBMISSIONS_AT)
        # The maps live as long as these views of them.
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            np.frombuffer(queues, np.uint32, 1, at) for at in (sq_head, sq_tail, cq_head, cq_tail)
        )
        self._completions = np.frombuffer(queues, _COMPLETION, completions, cq_entries)
        self._slots = np.frombuffer(slots, _SUBMISSION, entries)
        # Slot i is always announced as slot i.
        np.frombuffer(queues, np.uint32, entries, sq_array)[:] = np.arange(entries)

    @property
    def is_inherited(self) -> bool:
        """Whether it was made before this process was forked, and is the parent's."""
        return self._process != os.getpid()

    @property
    def queued(self) -> int:
        """Reads that were pushed and that the kernel did not take yet."""
        return (int(self._sq_tail[0]) - int(self._sq_head[0])) & _WORD

    @property
    def in_flight(self) -> int:
        """Reads that the kernel took and that were not reaped yet."""
        # From the queues themselves, which an interrupt cannot leave half counted.
        return (int(self._sq_head[0]) - int(self._cq_head[0])) & _WORD

    def push(
        self,
        descriptor: int,
        addresses: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tags: NDArray[np.int64],
    ) -> None:
        """Queue reads; there must be room for them.

        Parameters
        ----------
        descriptor
            Of the file.
        addresses, offsets, lengths
            int64, one per read: where the bytes go in memory, where they lie in the file, how many.
        tags
            int64, by which they are known when they are done.
        """
        tail = int(self._sq_tail[0])
        slots = np.zeros(len(tags), _SUBMISSION)
        slots["opcode"] = _OP_READ
        slots["descriptor"] = descriptor
        slots["offset"] = offsets
        slots["address"] = addresses
        slots["length"] = lengths
        slots["tag"] = tags
        self._slots[(tail + np.arange(len(tags))) & self._sq_mask] = slots
        self._sq_tail[0] = (tail + len(tags)) & _WORD

    def enter(self, complete: int) -> None:
        """Hand over what is queued and wait until so many reads are done.

        Raises
        ------
        OSError
            Where the kernel takes nothing, InterruptedError among them.
        """
        self._calls.ring_enter(self._descriptor, self.queued, complete)

    def retract(self) -> None:
        """Take back what is queued: the kernel looks at it in `enter` only."""
        self._sq_tail[0] = self._sq_head[0]

    def reap(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tags of reads that are done, and bytes read or errors below 0 of each."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        count = (tail - head) & _WORD
        done = self._completions[(head + np.arange(count)) & self._cq_mask]
        self._cq_head[0] = tail
        return done["tag"].astype(np.int64), done["result"].astype(np.int64)

    def close(self) -> None:
        """Give the ring back; harmless when done twice."""
        self._closing()
        # What is left of it goes with the maps.
        nothing = np.zeros(1, np.uint32)
        self._sq_head = self._sq_tail = self._cq_head = self._cq_tail = nothing
        self._completions, self._slots = np.zeros(0, _COMPLETION), np.zeros(0, _SUBMISSION)


def _close(calls: DriveCalls, descriptor: int) -> None:
    with suppress(OSError):
        calls.close(descriptor)


# --- The read engine ---

DEPTH = 64
# How often, and how far apart in seconds, a ring is asked again for reads that it does not return.
_TRIES, PAUSE_SECONDS = 50, 0.02


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
    pause
        Seconds before a ring is asked again for reads that it does not return.

    Raises
    ------
    OSError
        Where the kernel gives this thread no ring.
    """

    name = "uring"

    def __init__(
        self,
        threads: int,
        calls: DriveCalls,
        depth: int = DEPTH,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._calls = calls
        self._depth, self._pause = depth, pause
        # None once it is closed.
        self._local: threading.local | None = threading.local()
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
        # Never left to the garbage collector: CPython 3.11 frees such an object under a lock that
        # `sys._current_frames` holds while it may collect, and would wait for itself.
        self._local = None
        self._plain.close()

    def _ring(self) -> IORing:
        assert self._local is not None
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
                time.sleep(self._pause)
            ring.reap()
        if ring.in_flight:
            # The kernel may still write there: nobody may have this memory for anything else.
            self._lost.append(buffer)
            raise ColdPoolError(_LOST)


_LOST = (
    "io_uring did not give back reads of the cold pool that it had taken; "
    "choose --io threads (io in Python)"
)
