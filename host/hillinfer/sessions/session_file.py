# SPDX-License-Identifier: Apache-2.0
"""One file of a saved session, read and never written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import ColdPoolError
from hillinfer.sessions.errors import SessionError, cannot_open, damaged
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.cold_file import CHANGED, IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.row_sums import sums_of
from hillinfer.system_reason import reason_of, way_out

_HASH_BYTES = 1 << 20
# Numbers that a model computed do not shrink to this by any compression of a file system.
_LEAST_SHARE = 64
_MOST_UNLOOKED = 1 << 26


class SessionFile:
    """A regular file of a known size, open for reading.

    Parameters
    ----------
    directory, name
        Where it lies, for messages.
    descriptor
        Of the file; this object closes it.
    byte_count
        Its size.
    calls
        How the drive is reached.
    """

    def __init__(
        self, directory: Path, name: str, descriptor: int, byte_count: int, calls: DriveCalls
    ) -> None:
        self.name = name
        self.byte_count = byte_count
        self.io_mode = IOMode.BUFFERED
        self._directory = directory
        self._descriptor = descriptor
        self._calls = calls

    @classmethod
    def open(
        cls, directory: Path, name: str, byte_count: int | None, calls: DriveCalls
    ) -> SessionFile:
        """Open a file that must be regular and of the given size, where one is given.

        Raises
        ------
        SessionError
            With the reason.
        """
        try:
            # A link is not followed, and a pipe does not wait for its other end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = calls.open(directory / name, flags)
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
            return cls(directory, name, descriptor, status.st_size, calls)
        except BaseException:
            with suppress(OSError):
                calls.close(descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """Number of the open file, for who reads it by itself."""
        return self._descriptor

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise SessionError naming what failed."""
        unit = PAGE_BYTES if self.io_mode is IOMode.DIRECT else 1
        done = reached = 0
        while done < len(into):
            try:
                count = self._calls.preadv(self._descriptor, into[done:], offset + done)
            except InterruptedError:
                continue
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

    def digest(self) -> str:
        """Return the SHA-256 of the whole file, read past the page cache where that is possible."""
        return self.digest_and_sums(PAGE_BYTES)[0]

    def digest_and_sums(self, row_bytes: int) -> tuple[str, NDArray[np.uint32]]:
        """Return the SHA-256 of the whole file, and checksums of its rows from the same bytes.

        Parameters
        ----------
        row_bytes
            Bytes of a row, a multiple of 64; what is left behind the last one has no sum.
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
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._calls.preadv(self._descriptor, aligned_buffer(PAGE_BYTES).data, 0)
        except OSError:
            with suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return
        self.io_mode = IOMode.DIRECT

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                self._calls.close(descriptor)

    def _failure(self, count: int, offset: int, error: OSError) -> SessionError:
        return SessionError(
            f"could not read {count} bytes at {offset} of {self.name} of the session "
            f"{self._directory}: {reason_of(error)}; {way_out(error, 'read the document again')}"
        )


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
