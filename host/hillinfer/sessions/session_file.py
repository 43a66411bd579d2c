# SPDX-License-Identifier: Apache-2.0
"""One file of a saved session, read and never written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from hillinfer.sessions.errors import SessionError, cannot_open, damaged
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer
from hillinfer.storage.cold_file import IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.system_reason import reason_of, way_out

_HASH_BYTES = 1 << 20


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

    def digest(self) -> str:
        """Return the SHA-256 of the whole file, read past the page cache where that is possible."""
        sha256 = hashlib.sha256()
        buffer = aligned_buffer(_HASH_BYTES).data
        for offset in range(0, self.byte_count, _HASH_BYTES):
            piece = buffer[: min(_HASH_BYTES, self.byte_count - offset)]
            self.read(piece, offset)
            sha256.update(piece)
        return sha256.hexdigest()

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
