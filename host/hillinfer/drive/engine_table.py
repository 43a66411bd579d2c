# SPDX-License-Identifier: Apache-2.0
"""The table of read engines, which one for which --io, and the one of io_uring."""

from __future__ import annotations

import errno
import os
import threading
import weakref

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.read_engines import NativeThreadEngine, ReadEngine
from hillinfer.errors import SettingsError, reason_of
from hillinfer.native.library import NativeError
from hillinfer.settings import IOChoice

# --- Many reads in flight from one thread ---

DEPTH = 64


class IORing:
    """A ring of the thread that made it, given back when nobody has it any more.

    Parameters
    ----------
    depth
        Most reads in flight, a power of two.

    Raises
    ------
    OSError
        Where the kernel has no io_uring, an old one (before Linux 6.1), or forbids it.

    Attributes
    ----------
    address
        Of the native library's ring.
    close
        Gives it back; harmless when done twice.
    """

    def __init__(self, depth: int, calls: DriveCalls) -> None:
        self._process = os.getpid()
        self.address = calls.ring_open(depth)
        # A thread that ends takes its ring along. At the end of a program one may still read, and
        # whoever has the engine waits for it there.
        self.close = weakref.finalize(self, calls.ring_close, self.address)
        self.close.atexit = False

    @property
    def is_inherited(self) -> bool:
        """Whether it was made before this process was forked, and is the parent's."""
        return self._process != os.getpid()


class UringEngine(NativeThreadEngine):
    """A `ReadEngine` with one ring for each thread that reads.

    Where a thread gets none, the native library's threads read.

    Parameters
    ----------
    threads
        Reads in flight where a ring does not serve.
    depth
        Reads in flight in a ring, a power of two.

    Raises
    ------
    OSError
        Where the kernel gives this thread no ring.
    """

    name = "uring"

    def __init__(self, threads: int, calls: DriveCalls, depth: int = DEPTH) -> None:
        super().__init__(threads, calls)
        self._depth = depth
        # None once it is closed.
        self._local: threading.local | None = threading.local()
        # Rings of threads that ended are gone from here.
        self._rings: weakref.WeakSet[IORing] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._made()

    def close(self) -> None:
        """Wait for reads under way and give all rings back."""
        super().close()
        with self._changing:
            for ring in self._rings:
                ring.close()
        # Never left to the garbage collector: CPython 3.11 frees such an object under a lock that
        # `sys._current_frames` holds while it may collect, and would wait for itself.
        self._local = None

    def _ring(self) -> int | None:
        try:
            return self._made().address
        except OSError:
            return None

    def _made(self) -> IORing:
        assert self._local is not None
        ring: IORing | None = getattr(self._local, "ring", None)
        # A child of a fork that used its parent's ring would take away the parent's reads.
        if ring is None or ring.is_inherited:
            ring = self._local.ring = IORing(self._depth, self._calls)
            with self._changing:
                self._rings.add(ring)
        return ring


# --- The table ---

_REASONS = {
    errno.ENOSYS: "the kernel has none",
    errno.EINVAL: "the kernel is older than Linux 6.1",
    errno.EPERM: "it is forbidden here (kernel.io_uring_disabled, or the container's rules)",
    errno.EACCES: "it is forbidden here",
    errno.EMFILE: "too many files are open, raise the limit with ulimit -n",
    errno.ENFILE: "the machine has too many open files",
    errno.ENOMEM: "the kernel has no memory for it, or the limit on locked memory is too low",
}


def open_engine(choice: IOChoice, threads: int, calls: DriveCalls) -> ReadEngine:
    """Return the engine of a choice; automatically, io_uring wherever the kernel gives a ring.

    Parameters
    ----------
    threads
        Reads in flight without io_uring.

    Raises
    ------
    SettingsError
        Where io_uring is asked for and not to be had.
    """
    if choice is IOChoice.THREADS:
        return NativeThreadEngine(threads, calls)
    try:
        return UringEngine(threads, calls)
    except OSError as error:
        if choice is IOChoice.AUTO:
            return NativeThreadEngine(threads, calls)
        raise SettingsError(
            f"io=uring: no io_uring, {_reason(error)}; choose --io auto or --io threads"
        ) from error


def why_no_ring(calls: DriveCalls) -> str | None:
    """Return why the kernel gives no ring, or None where it gives one."""
    try:
        UringEngine(1, calls).close()
    except OSError as error:
        return _reason(error)
    except NativeError:
        return "the native library, which makes rings, is missing"
    return None


def engine_text(name: str) -> str:
    """Return an engine in words, by its name."""
    return {
        "uring": f"io_uring, up to {DEPTH} reads in flight",
        "threads": "a pool of threads, one read in flight in each",
    }[name]


def _reason(error: OSError) -> str:
    known = _REASONS.get(error.errno or 0)
    return known or reason_of(error)
