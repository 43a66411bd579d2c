# SPDX-License-Identifier: Apache-2.0
"""A ring of io_uring: reads go in and come back in any order, many by one system call."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.drive_calls import DriveCalls

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
    """Reads of one thread, the one that made the ring.

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
