# SPDX-License-Identifier: Apache-2.0
"""One file of a saved session: checked when it is opened, and never written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import sums_of
from hillinfer.drive.files import CHANGED, PAGE_BYTES, IOMode, aligned_buffer, round_up
from hillinfer.drive.shared_files import OpenFiles, ReopenedFile
from hillinfer.errors import SHORTAGE, ColdPoolError, SessionError, reason_of, way_out
from hillinfer.sessions.manifest import changed_in_use, damaged

Result = TypeVar("Result")

# A link is not followed, and a pipe does not wait for its other end.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_HASH_BYTES = 1 << 20
# Numbers that a model computed do not shrink to this by any compression of a file system.
_LEAST_SHARE = 64
_MOST_UNLOOKED = 1 << 26


class SessionFile:
    """A regular file of a known size, open for reading.

    It stays open until it shares descriptors with others; from then on it may be closed while
    nobody reads it, and is opened again by its name, and only if it is the same file still. This
    object closes the descriptor.
    """

    def __init__(
        self, directory: Path, name: str, descriptor: int, status: os.stat_result, calls: DriveCalls
    ) -> None:
        self.name = name
        self.byte_count = status.st_size
        self.io_mode, self.read_unit = IOMode.BUFFERED, PAGE_BYTES
        # What tells it from any other file, and from itself once somebody has written to it.
        self.identity = _identity(status)
        self._directory = directory
        # Whatever directory the process is in when it is opened again.
        self._path = directory.absolute() / name
        self._calls = calls
        self._file = ReopenedFile(descriptor, self._opened_again, self._not_opened, self._closed)

    @classmethod
    def open(
        cls, directory: Path, name: str, byte_count: int | None, calls: DriveCalls
    ) -> SessionFile:
        """Open a file that must be regular and of the given size, where one is given.

        Raises SessionError with the reason.
        """
        try:
            descriptor = calls.open(directory / name, _FLAGS)
        except FileNotFoundError as error:
            raise damaged(directory, f"{name} is missing") from error
        except OSError as error:
            raise cannot_open(directory, f"{name} cannot be opened", error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(directory, f"{name} is no regular file")
            if byte_count is not None and status.st_size != byte_count:
                change = "cut short" if status.st_size < byte_count else "extended"
                raise damaged(
                    directory,
                    f"{name} has {status.st_size} bytes and should have {byte_count}: it was "
                    f"{change}",
                )
            if _is_nearly_empty(descriptor, status):
                raise damaged(directory, f"{name} was never written: nearly all of it is holes")
            return cls(directory, name, descriptor, status, calls)
        except BaseException:
            with suppress(OSError):
                calls.close(descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """Number of the open file, for who reads it by itself; it stays open until `close`."""
        return self._file.pin()

    def share(self, files: OpenFiles) -> None:
        """Share descriptors with other files from here on; nobody reads it now."""
        self._file.share(files)

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with a descriptor that stays open meanwhile, and return what it returns.

        Raises SessionError where it was closed meanwhile and cannot be opened again, or is another
        file.
        """
        return self._file.lend(use)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise SessionError naming what failed."""
        self.lend(lambda descriptor: self._fill(descriptor, into, offset))

    def _fill(self, descriptor: int, into: memoryview, offset: int) -> None:
        unit = PAGE_BYTES if self.io_mode is IOMode.DIRECT else 1
        done = reached = 0
        while done < len(into):
            try:
                count = self._calls.preadv(descriptor, into[done:], offset + done)
            except OSError as error:
                raise self._failure(len(into), offset, error) from error
            if done + count <= reached:
                stuck = OSError(errno.EIO, "no more bytes come")
                raise self._failure(len(into), offset, stuck)
            reached = done + count
            # Direct I/O may stop anywhere but must go on at a multiple of 4,096.
            done = reached if reached == len(into) else reached // unit * unit

    def changed(self, byte_count: int, offset: int) -> ColdPoolError:
        """Return the error that says that bytes are not those that were verified."""
        return ColdPoolError(
            f"{byte_count} bytes at {offset} of {self.name} of the session {self._directory} are "
            f"not what was read there before: {CHANGED}, and read the document again with "
            "--save-session"
        )

    def digest_and_sums(self, row_bytes: int) -> tuple[str, NDArray[np.uint32]]:
        """Return the SHA-256 of the whole file, and checksums of its rows from the same bytes.

        `row_bytes` is a multiple of 64; what is left behind the last row has no sum.
        """
        sha256 = hashlib.sha256()
        # Whole rows, that begin at pages.
        unit = math.lcm(row_bytes, PAGE_BYTES)
        most = min(max(1, _HASH_BYTES // unit) * unit, round_up(self.byte_count, PAGE_BYTES))
        buffer = aligned_buffer(most)
        sums = np.zeros(self.byte_count // row_bytes, np.uint32)
        for offset in range(0, self.byte_count, most or 1):
            piece = buffer[: min(most, self.byte_count - offset)]
            self.read(piece.data, offset)
            sha256.update(piece.data)
            rows = piece[: len(piece) // row_bytes * row_bytes].reshape(-1, row_bytes)
            first = offset // row_bytes
            sums[first : first + len(rows)] = sums_of(rows, np.arange(len(rows)))
        return sha256.hexdigest(), sums

    def content(self) -> bytes:
        """Return the whole file, which is small."""
        data = bytearray(self.byte_count)
        self.read(memoryview(data), 0)
        return bytes(data)

    def go_direct(self) -> None:
        """Read past the page cache from now on, where file system and size allow it."""
        if self.byte_count % PAGE_BYTES or not self.byte_count:
            return
        if self.lend(self._reads_direct):
            self.io_mode = IOMode.DIRECT
            self.read_unit = self.lend(self._calls.read_unit)

    def close(self) -> None:
        """Close the file, once nobody reads it any more; harmless when done twice."""
        self._file.close()

    def _reads_direct(self, descriptor: int) -> bool:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._calls.preadv(descriptor, aligned_buffer(PAGE_BYTES).data, 0)
        except OSError:
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def _opened_again(self) -> int:
        direct = os.O_DIRECT if self.io_mode is IOMode.DIRECT else 0
        descriptor = self._calls.open(self._path, _FLAGS | direct)
        try:
            found = _identity(os.fstat(descriptor))
        except BaseException:
            self._closed(descriptor)
            raise
        if found != self.identity:
            self._closed(descriptor)
            replaced = found[:2] != self.identity[:2]
            what = "is another file now" if replaced else "was written to"
            raise changed_in_use(self._directory, f"{self.name} {what}")
        return descriptor

    def _not_opened(self, error: OSError) -> SessionError:
        if error.errno == errno.ENOENT:
            return changed_in_use(self._directory, f"{self.name} is not there any more")
        return cannot_open(self._directory, f"{self.name} cannot be opened again", error)

    def _closed(self, descriptor: int) -> None:
        # The descriptor is gone even where closing fails.
        with suppress(OSError):
            self._calls.close(descriptor)

    def _failure(self, count: int, offset: int, error: OSError) -> SessionError:
        return SessionError(
            f"could not read {count} bytes at {offset} of {self.name} of the session "
            f"{self._directory}: {reason_of(error)}; {way_out(error, 'read the document again')}"
        )


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_nearly_empty(descriptor: int, status: os.stat_result) -> bool:
    """Say whether a large file has nearly no content, so that reading it would only take time."""
    written = status.st_blocks * 512
    if status.st_size <= _MOST_UNLOOKED or written >= status.st_size // _LEAST_SHARE:
        return False
    try:
        # File systems that do not count blocks do not tell of holes either.
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < status.st_size
    except OSError:
        return False


def cannot_open(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why something of a session cannot be opened and what to do.

    Where the reason is a shortage of this process, nothing is said about the session.
    """
    fix = way_out(error, "read the document again with --save-session")
    if error.errno in SHORTAGE:
        return SessionError(
            f"the session {directory} cannot be opened now: {what}: {reason_of(error)}; {fix}"
        )
    return SessionError(f"the session {directory} is refused: {what}: {reason_of(error)}; {fix}")
