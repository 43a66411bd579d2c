# SPDX-License-Identifier: Apache-2.0
"""A drive whose reads are looked at one by one, so that a test can spoil any of them."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cached_property

from hillinfer.drive.calls import DriveCalls
from hillinfer.native.structures import DoneWatch, EnterWatch, Watch

_IO_URING_ENTER = 426
_GET_EVENTS = 1
_SYSTEM = ctypes.CDLL(None, use_errno=True)
_SYSTEM.syscall.restype = ctypes.c_long


class SingleReads(DriveCalls):
    """Has `ring_enter` and `read_done` called for what the native library does.

    An OSError of theirs is one that the kernel told. They are called by the thread that waits for
    its reads, which no interrupt reaches there.
    """

    def ring_enter(self, ring: int, submit: int, complete: int) -> int:
        """Hand over queued reads, wait until some completed, and return how many were taken."""
        words = [ctypes.c_uint(word) for word in (ring, submit, complete, _GET_EVENTS)]
        nothing = ctypes.c_void_p(None)
        taken = int(_SYSTEM.syscall(_IO_URING_ENTER, *words, nothing, ctypes.c_size_t(0)))
        if taken < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return taken

    def read_done(self, descriptor: int, into: memoryview, offset: int, result: int) -> int:
        """Return how many bytes one read of many brought, by what the kernel said of it."""
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    @property
    def watch(self) -> int:
        """Address of what the native library calls."""
        return ctypes.addressof(self._watch)

    @cached_property
    def _watch(self) -> Watch:
        return Watch(EnterWatch(_entering(self)), DoneWatch(_done(self)))


def _entering(calls: SingleReads):
    def enter(ring: int, submit: int, complete: int) -> int:
        try:
            return calls.ring_enter(ring, submit, complete)
        except OSError as error:
            return -(error.errno or errno.EIO)

    return enter


def _done(calls: SingleReads):
    def done(descriptor: int, address: int, count: int, offset: int, result: int) -> int:
        into = memoryview((ctypes.c_ubyte * count).from_address(address)).cast("B")
        try:
            return calls.read_done(descriptor, into, offset, result)
        except OSError as error:
            return -(error.errno or errno.EIO)

    return done
