# SPDX-License-Identifier: Apache-2.0
"""Drives that fail on purpose: at one call, or at every call of a kind."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from single_reads import SingleReads

from hillinfer.drive.calls import DriveCalls

# What the native library does is asked for each call and read of its own.
KINDS = (
    *(name for name, own in vars(DriveCalls).items() if callable(own) and name[0] != "_"),
    *("ring_enter", "read_done"),
)


class Fault(StrEnum):
    """How a call goes wrong."""

    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EDQUOT = "EDQUOT"
    EINTR = "EINTR"
    EAGAIN = "EAGAIN"
    ENOSYS = "ENOSYS"
    EPERM = "EPERM"
    ENOMEM = "ENOMEM"
    SHORT = "short"
    ODD = "odd"
    NOTHING = "nothing"
    DELAY = "delay"
    # What no ring does: it says that all came, and nothing did. Whoever believes it errs.
    LOST = "lost"


# What a file system may do to each call. One that a signal interrupts Python itself makes again; of
# those of its rings the library hears.
_ERRORS = (Fault.EIO, Fault.DELAY)
_SPACE = (Fault.ENOSPC, Fault.EDQUOT)
_PARTS = (Fault.SHORT, Fault.ODD, Fault.NOTHING)
FAULTS: dict[str, tuple[Fault, ...]] = {
    "open": (Fault.EIO, *_SPACE, Fault.DELAY),
    "close": (Fault.EIO, Fault.ENOSPC, Fault.DELAY),
    "pwrite": (*_ERRORS, *_SPACE, *_PARTS),
    "preadv": (*_ERRORS, *_PARTS),
    "read_many": (Fault.DELAY,),
    "read_to_blocks": (Fault.DELAY,),
    "land": (Fault.DELAY,),
    "ring_open": (Fault.ENOSYS, Fault.EPERM, Fault.ENOMEM, Fault.DELAY),
    "ring_close": (Fault.DELAY,),
    "ring_enter": (*_ERRORS, Fault.EINTR, Fault.EAGAIN),
    "read_done": (*_ERRORS, Fault.EINTR, *_PARTS),
    # A system that does not say it is no failure: reads are of pages then.
    "read_unit": (Fault.DELAY,),
    "size": (Fault.EIO, Fault.DELAY),
    "free_bytes": _ERRORS,
    "allocate": (*_ERRORS, *_SPACE),
    "fsync": (*_ERRORS, *_SPACE),
    "fdatasync": (*_ERRORS, *_SPACE),
    "lock": (Fault.EIO, Fault.DELAY),
    "mkdir": (Fault.EIO, *_SPACE, Fault.DELAY),
    "link": (Fault.EIO, *_SPACE, Fault.DELAY),
    "rename": (Fault.EIO, *_SPACE, Fault.DELAY),
    "unlink": (Fault.EIO, Fault.DELAY),
    "rmdir": (Fault.EIO, Fault.DELAY),
}
# After these a run must give the right tokens; after the others it may end with a clear error.
HARMLESS = frozenset(
    (
        *(Fault.EINTR, Fault.SHORT, Fault.ODD, Fault.DELAY),
        *(Fault.EAGAIN, Fault.ENOSYS, Fault.EPERM, Fault.ENOMEM),
    )
)


@dataclass(frozen=True)
class Injection:
    """One fault at one call.

    Parameters
    ----------
    kind
        Name of a method of `DriveCalls`.
    index
        Which call of that kind, from 0; every one where None.
    fault
        What happens to it.
    """

    kind: str
    index: int | None
    fault: Fault


class FaultyCalls(SingleReads):
    """The operating system, with one thing that goes wrong; counts the calls of each kind.

    Parameters
    ----------
    injection
        What goes wrong; None only counts.
    delay_seconds
        How long a delayed call takes.
    below
        The file system that is reached where nothing goes wrong.
    """

    def __init__(
        self,
        injection: Injection | None = None,
        delay_seconds: float = 0.05,
        below: DriveCalls | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.hits = 0
        self.injection = injection
        self._delay_seconds = delay_seconds
        self._below = below or DriveCalls()
        self._counting = threading.Lock()

    def begin(self, injection: Injection | None = None) -> None:
        """Count anew, with something else that goes wrong."""
        with self._counting:
            self.counts.clear()
            self.hits, self.injection = 0, injection

    def _goes_wrong(self, kind: str) -> Fault | None:
        with self._counting:
            index = self.counts[kind]
            self.counts[kind] += 1
            injection = self.injection
            if injection is None or injection.kind != kind:
                return None
            # An interrupted call is made again: every one at once would go on for ever.
            if injection.index is None and injection.fault is Fault.EINTR and index % 2:
                return None
            if injection.index not in (None, index):
                return None
            self.hits += 1
            return injection.fault


class WithoutDirectIO(DriveCalls):
    """A file system that refuses direct I/O."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open as the system does, but only through the page cache."""
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)


class PlainFileSystem(WithoutDirectIO):
    """A file system that knows neither direct I/O nor nameless files."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open as the system does, but only what has a name."""
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return super().open(path, flags, mode)


class WithoutNativeReads(SingleReads):
    """A process whose native reads all fail: each is made again the ordinary way."""

    def read_done(self, *args: Any) -> int:
        """Refuse."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class KillingCalls(SingleReads):
    """The operating system, under a process that dies right before or after one of its calls.

    Parameters
    ----------
    index
        Which call, of any kind.
    moment
        `before` or `after` it.
    """

    def __init__(self, index: int, moment: str) -> None:
        self._left = index
        self._moment = moment
        self._counting = threading.Lock()

    def die(self, moment: str) -> None:
        """End the process if its moment has come."""
        with self._counting:
            if moment == "before":
                self._left -= 1
            if self._left < 0 and moment == self._moment:
                os.kill(os.getpid(), signal.SIGKILL)


def _with_faults(kind: str) -> Callable[..., Any]:
    real = getattr(SingleReads, kind)

    @functools.wraps(real)
    def call(self: FaultyCalls, *args: Any) -> Any:
        fault = self._goes_wrong(kind)
        # Only this one knows reads by themselves, wherever they are made.
        reached = getattr(self._below, kind, functools.partial(real, self))
        if fault is None:
            return reached(*args)
        if fault is Fault.DELAY:
            time.sleep(self._delay_seconds)
            return reached(*args)
        if kind == "read_done":
            return _of_ring(fault, args[1], reached(*args))
        if fault is Fault.NOTHING:
            return 0
        if fault in (Fault.SHORT, Fault.ODD):
            descriptor, data, offset = args
            # Where every transfer is short, each must still get a page further.
            unit = 512 if self.injection.index is not None else 4096
            half = max(unit, len(data) // 2 // unit * unit)
            return _part(kind, descriptor, data, offset, half - (fault is Fault.ODD))
        if kind == "close":
            # The system closes the descriptor and tells of an earlier failure.
            reached(*args)
        number = getattr(errno, fault.value)
        raise OSError(number, os.strerror(number))

    return call


def _deadly(kind: str) -> Callable[..., Any]:
    real = getattr(SingleReads, kind)

    @functools.wraps(real)
    def call(self: KillingCalls, *args: Any) -> Any:
        self.die("before")
        result = real(self, *args)
        self.die("after")
        return result

    return call


def _part(kind: str, descriptor: int, data: memoryview, offset: int, count: int) -> int:
    """Move the first bytes only, through the page cache, which takes any count."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if kind == "pwrite":
            return os.pwrite(own, data[:count], offset)
        return os.preadv(own, [data[:count]], offset)
    finally:
        if kind == "pwrite":
            os.fsync(own)
        os.close(own)


def _of_ring(fault: Fault, data: memoryview, count: int) -> int:
    """Say that less came, or nothing, and spoil what came nevertheless."""
    unit = 512
    half = max(unit, count // 2 // unit * unit)
    came = {Fault.SHORT: half, Fault.ODD: half - 1}.get(fault, 0)
    data[came:] = bytes([0xEE]) * (len(data) - came)
    if fault is Fault.LOST:
        return count
    if fault in (Fault.EIO, Fault.EINTR):
        number = getattr(errno, fault.value)
        raise OSError(number, os.strerror(number))
    return came


for _kind in KINDS:
    setattr(FaultyCalls, _kind, _with_faults(_kind))
    setattr(KillingCalls, _kind, _deadly(_kind))
