# SPDX-License-Identifier: Apache-2.0
"""Every system call that reads or writes the drive, in one place."""

from __future__ import annotations

import ctypes
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library

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

    def only(self, chosen: NDArray[np.int64]) -> Reads:
        """Return some of them, by int64 number."""
        return Reads(
            self.file_offsets[chosen], self.buffer_offsets[chosen], self.byte_counts[chosen]
        )


# --- The system calls ---

# The same numbers on every kind of processor.
_IO_URING_SETUP, _IO_URING_ENTER = 425, 426
_ENTER_GETEVENTS = 1
# A call through CDLL lets other threads of Python run meanwhile.
_SYSTEM = ctypes.CDLL(None, use_errno=True)
_SYSTEM.syscall.restype = ctypes.c_long


class DriveCalls:
    """Passes each call on to the operating system.

    Everything that storage does to a drive goes through here, so that a test can count the calls
    and let any one of them fail the way a drive fails. Descriptors are closed on exec; errors are
    the system's own `OSError`.
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

    def read_many(self, descriptor: int, reads: Reads, address: int, threads: int) -> list[int]:
        """Make reads into memory at an address, so many in flight; none is under way afterwards.

        Returns what the kernel said of each: bytes that came, or an error number below 0.
        """
        results = np.zeros(len(reads), np.int64)
        places = (
            np.ascontiguousarray(reads.file_offsets, np.int64),
            (reads.buffer_offsets + address).astype(np.uint64),
            np.ascontiguousarray(reads.byte_counts, np.int64),
        )
        native_library().read_file(descriptor, places, results, threads)
        return results.tolist()

    def ring_open(self, entries: int, parameters: NDArray[np.uint32]) -> int:
        """Make a ring of io_uring, fill in its parameters (30 words) and return its descriptor."""
        address = ctypes.c_void_p(parameters.ctypes.data)
        return _checked(_SYSTEM.syscall(_IO_URING_SETUP, ctypes.c_uint(entries), address))

    def ring_enter(self, ring: int, submit: int, complete: int) -> int:
        """Hand over queued reads, wait until some completed, and return how many were taken."""
        words = (ring, submit, complete, _ENTER_GETEVENTS)
        given = [ctypes.c_uint(word) for word in words]
        nothing = ctypes.c_void_p(None)
        return _checked(
            _SYSTEM.syscall(_IO_URING_ENTER, *given, nothing, ctypes.c_size_t(0)),
        )

    def reads_done(
        self,
        descriptor: int,
        buffer: NDArray[np.uint8],
        reads: Reads,
        done: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return how many bytes reads of these numbers brought, by what the kernel said of each.

        All at once: to look at every read takes Python longer than the kernel takes to make it.
        What is below 0 is an error.
        """
        return results

    def size(self, descriptor: int) -> int:
        """Return how many bytes long an open file is."""
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Take room on the drive for a part of a file, which reads as zeros until it is written."""
        os.posix_fallocate(descriptor, offset, byte_count)

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


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
