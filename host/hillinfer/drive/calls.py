# SPDX-License-Identifier: Apache-2.0
"""Every system call that reads or writes the drive, in one place."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library
from hillinfer.native.structures import FileReads, Landing, ReadWay

# --- Reads ---


@dataclass(frozen=True)
class Reads:
    """Where bytes lie and where they go.

    Parameters
    ----------
    file_offsets, buffer_offsets, byte_counts
        int64, one entry per read; multiples of 4,096 where the file is read past the page cache.
    """

    file_offsets: NDArray[np.int64]
    buffer_offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]

    @classmethod
    def in_pieces(cls, offset: int, byte_count: int, most: int) -> Reads:
        """Return one read, `byte_count` bytes at `offset`, cut into pieces of at most `most`."""
        starts = np.arange(0, byte_count, most)
        return cls(starts + offset, starts, np.minimum(byte_count - starts, most))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.file_offsets)


# --- What direct I/O asks for ---

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
# Of struct statx: what it tells, and to what memory and offsets of direct I/O are aligned.
_STATX_BYTES, _STATX_ALIGNMENTS = 256, 0x98


def _direct_unit(descriptor: int) -> int:
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return mmap.PAGESIZE
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return mmap.PAGESIZE
    (told,) = struct.unpack_from("=I", found, 0)
    unit = max(struct.unpack_from("=2I", found, _STATX_ALIGNMENTS))
    fits = told & _STATX_DIOALIGN and unit and mmap.PAGESIZE % unit == 0
    return unit if fits else mmap.PAGESIZE


@contextmanager
def _table(reads: Reads, address: int) -> Iterator[tuple[FileReads, NDArray[np.int64]]]:
    """Give reads as the library takes them, and where results go, as long as both are needed."""
    offsets = np.ascontiguousarray(reads.file_offsets, np.int64)
    counts = np.ascontiguousarray(reads.byte_counts, np.int64)
    addresses = (reads.buffer_offsets + address).astype(np.uint64)
    results = np.zeros(len(reads), np.int64)
    arrays = (offsets, addresses, counts, results)
    yield FileReads(len(reads), *(one.ctypes.data for one in arrays)), results


# --- The system calls ---


class DriveCalls:
    """Passes each call on to the operating system.

    Everything that storage does to a drive goes through here, so that a test can count the calls
    and let any one of them fail the way a drive fails. Descriptors are closed on exec; errors are
    the system's own `OSError`. A call that a signal interrupts Python makes again by itself.
    """

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file or directory and return its descriptor; one that is made has this mode."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        if flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE:
            # The user's mask takes rights away, in odd cases the owner's own.
            with suppress(OSError):
                os.fchmod(descriptor, mode)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a descriptor, which is gone afterwards even where this fails."""
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at an offset in bytes and return how many were written, maybe fewer."""
        return os.pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read at an offset in bytes and return how many came, maybe fewer."""
        return os.preadv(descriptor, [into], offset)

    watch: int | None = None
    """Address of a `Watch`, which the native library then shows every read that it makes."""

    def read_many(self, way: ReadWay, reads: Reads, address: int) -> NDArray[np.int64] | None:
        """Make reads into memory at an address, many in flight.

        Returns what the kernel said of each, int64: bytes that came, or an error number below 0.
        None is under way afterwards, unless None is returned: a ring did not give its reads back.
        """
        with _table(reads, address) as (table, results):
            return results if native_library().read_file(way, table) else None

    def read_to_blocks(
        self, way: ReadWay, reads: Reads, address: int, rows: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Do as `read_many`, and place the rows of each read that brought all its bytes.

        Parameters
        ----------
        way, reads, address
            As there.
        rows
            int64 (reads, fields of `BlockRows`), the rows of each.
        """
        with _table(reads, address) as (table, results):
            return results if native_library().read_to_blocks(way, table, rows) else None

    def land(self, way: ReadWay, landing: Landing) -> bool:
        """Bring rows of a file to their places; see `NativeLibrary.land`."""
        return native_library().land(way, landing)

    def ring_open(self, depth: int) -> int:
        """Make a ring of io_uring for the calling thread and return its address."""
        return native_library().open_ring(depth)

    def ring_close(self, ring: int) -> None:
        """Give a ring back."""
        native_library().close_ring(ring)

    def read_unit(self, descriptor: int) -> int:
        """Return what direct reads of a file are multiples of, in bytes.

        As the file system says it, mostly 512; a page where it does not (Linux before 6.1).
        """
        return _direct_unit(descriptor)

    def size(self, descriptor: int) -> int:
        """Return how many bytes long an open file is."""
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Take room on the drive for a part of a file, which reads as zeros until it is written."""
        os.posix_fallocate(descriptor, offset, byte_count)

    def free_bytes(self, descriptor: int) -> int:
        """Return the bytes that the drive of an open file has for this user."""
        found = os.fstatvfs(descriptor)
        # Some file systems in user space count nothing.
        return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize

    def fsync(self, descriptor: int) -> None:
        """Wait until a file's or directory's content is on the drive."""
        os.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        """Wait until a file's bytes are on the drive."""
        os.fdatasync(descriptor)

    def lock(self, descriptor: int) -> None:
        """Take the one exclusive lock of an open file or directory, or raise BlockingIOError."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def mkdir(self, path: Path) -> None:
        """Make an owner-only directory."""
        path.mkdir(mode=0o700)
        # As for files; some file systems know no modes.
        with suppress(OSError):
            path.chmod(0o700)

    def link(self, descriptor: int, path: Path) -> None:
        """Give an open nameless file a name, which must not exist yet."""
        # Only with a directory's descriptor, which an absolute path does not need, is the symbolic
        # link of /proc followed.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or directory to another name on the same drive, at one moment."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Take a file's name away."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()
