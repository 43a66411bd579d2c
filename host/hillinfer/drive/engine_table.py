# SPDX-License-Identifier: Apache-2.0
"""The table of read engines: which one for which `--io`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.read_engines import NativeThreadEngine, ReadEngine
from hillinfer.drive.uring import DEPTH, UringEngine
from hillinfer.errors import SettingsError, reason_of
from hillinfer.native.library import NativeError
from hillinfer.settings import IOChoice

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
    choice
        Which.
    threads
        Reads in flight without io_uring.
    calls
        How the drive is reached.

    Raises
    ------
    SettingsError
        Where io_uring is asked for and not to be had.
    """
    return _ENGINES[choice](threads, calls)


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


def _automatic(threads: int, calls: DriveCalls) -> ReadEngine:
    try:
        return UringEngine(threads, calls)
    except OSError:
        return _threads(threads, calls)


def _uring(threads: int, calls: DriveCalls) -> ReadEngine:
    try:
        return UringEngine(threads, calls)
    except OSError as error:
        raise SettingsError(
            f"io=uring: no io_uring, {_reason(error)}; choose --io auto or --io threads"
        ) from error


def _threads(threads: int, calls: DriveCalls) -> ReadEngine:
    return NativeThreadEngine(threads, calls)


def _reason(error: OSError) -> str:
    known = _REASONS.get(error.errno or 0)
    return known or reason_of(error)


_ENGINES: Mapping[IOChoice, Callable[[int, DriveCalls], ReadEngine]] = MappingProxyType(
    {IOChoice.AUTO: _automatic, IOChoice.URING: _uring, IOChoice.THREADS: _threads}
)
