# SPDX-License-Identifier: Apache-2.0
"""One nameless file on the drive."""

from __future__ import annotations

import errno
import os
import tempfile
from enum import StrEnum
from pathlib import Path

from hillinfer.errors import ColdPoolError
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer


class IOMode(StrEnum):
    """Whether reads and writes go past the page cache."""

    DIRECT = "direct"
    BUFFERED = "buffered"


class ColdFile:
    """An owner-only file without a name, so that it is gone however the process ends.

    Parameters
    ----------
    directory
        An existing directory on the drive.
    mode
        Direct or buffered I/O; direct needs offsets, lengths and buffers aligned to 4,096 bytes.

    Raises
    ------
    ColdPoolError
        Where the directory cannot hold a file.
    """

    def __init__(self, directory: Path, mode: IOMode) -> None:
        self._directory = directory
        self._descriptor = _open_nameless(directory, os.O_DIRECT if mode is IOMode.DIRECT else 0)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, or raise ColdPoolError naming what failed."""
        done = 0
        while done < len(data):
            try:
                written = os.pwrite(self._descriptor, data[done:], offset + done)
            except OSError as error:
                raise self._failure("write", len(data), offset, error) from error
            if written == 0:
                raise self._failure("write", len(data), offset, OSError(errno.EIO, "no progress"))
            done += written

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise ColdPoolError naming what failed."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise self._failure("read", len(into), offset, error) from error
            if count == 0:
                raise self._failure("read", len(into), offset, OSError(errno.EIO, "file too short"))
            done += count

    def close(self) -> None:
        """Give the file's space back; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _failure(self, verb: str, count: int, offset: int, error: OSError) -> ColdPoolError:
        fix = (
            "free space on the drive or choose another --cold-dir"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "check the drive"
        )
        return ColdPoolError(
            f"could not {verb} {count} bytes at {offset} of the cold pool in "
            f"{self._directory}: {error.strerror}; {fix}"
        )


def probe_io_mode(directory: Path) -> IOMode:
    """Write and read one block with direct I/O and say whether the directory allows it.

    Raises
    ------
    ColdPoolError
        Where not even buffered I/O works there.
    """
    block = aligned_buffer(PAGE_BYTES).data
    block[:4] = b"HILL"
    for mode in IOMode:
        try:
            file = ColdFile(directory, mode)
        except ColdPoolError:
            if mode is IOMode.BUFFERED:
                raise
            continue
        try:
            file.write(block, 0)
            file.read(block, 0)
        except ColdPoolError:
            if mode is IOMode.BUFFERED:
                raise
        else:
            return mode
        finally:
            file.close()
    raise AssertionError("unreachable: buffered I/O either works or raises")


def _open_nameless(directory: Path, extra_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _unusable(directory, error) from error
    # Some file systems know no nameless files: name one and take the name away at once.
    try:
        named, name = tempfile.mkstemp(prefix="hillinfer-", dir=directory)
        try:
            return os.open(name, flags)
        finally:
            Path(name).unlink()
            os.close(named)
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> ColdPoolError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ColdPoolError(
            f"cannot open another file of the cold pool: {error.strerror}; a file per layer is "
            "needed, raise the limit with ulimit -n"
        )
    return ColdPoolError(
        f"cannot keep the cold pool in {directory}: {error.strerror}; "
        "choose a writable directory on a drive with --cold-dir"
    )
