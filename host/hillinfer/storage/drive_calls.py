# SPDX-License-Identifier: Apache-2.0
"""The system calls that storage makes, in one place."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class DriveCalls:
    """Passes each call on to the operating system.

    Everything that storage does to a drive goes through here, so that a test can count the calls
    and let any one of them fail the way a drive fails. Descriptors are closed on exec; errors are
    the system's own `OSError`.
    """

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file or directory and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        """Close a descriptor, which is gone afterwards even where this fails."""
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at an offset in bytes and return how many were written, maybe fewer."""
        return os.pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read at an offset in bytes and return how many came, maybe fewer."""
        return os.preadv(descriptor, [into], offset)

    def size(self, descriptor: int) -> int:
        """Return how many bytes long an open file is."""
        return os.fstat(descriptor).st_size

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
