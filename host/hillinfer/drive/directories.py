# SPDX-License-Identifier: Apache-2.0
"""Where the cold pool lies, what drive lies behind a directory, and who alone changes one."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import IOMode, buffered_warning, probe_io_mode
from hillinfer.errors import ColdPoolError, reason_of, way_out
from hillinfer.system.files import user_cache_dir

# --- The cold pool's directory ---

_ANOTHER = "choose a directory on a drive with --cold-dir"
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a drive without a file system"),
)


def prepared_cold_dir(chosen: Path | None) -> Path:
    """Return the directory to use; only the default one is made where it is missing.

    Raises
    ------
    ColdPoolError
        Where a chosen directory does not exist or is none.
    SettingsError
        Where the default one cannot be made.
    """
    if chosen is None:
        return user_cache_dir("cold")
    try:
        mode = chosen.stat().st_mode
    except FileNotFoundError as error:
        raise ColdPoolError(_missing(chosen)) from error
    except (OSError, ValueError) as error:
        # A path with a zero byte is a ValueError.
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        fix = way_out(error, _ANOTHER) if isinstance(error, OSError) else _ANOTHER
        raise ColdPoolError(
            f"the cold directory {_shown(chosen)} cannot be looked at: {reason}; {fix}"
        ) from error
    if not stat.S_ISDIR(mode):
        kind = next((name for is_one, name in _KINDS if is_one(mode)), "something else")
        raise ColdPoolError(
            f"the cold directory {chosen} is no directory but {kind}: {_ANOTHER}, or make one there"
        )
    return chosen


def _missing(chosen: Path) -> str:
    if chosen.is_symlink():
        return (
            f"the cold directory {chosen} does not exist: it is a link to {chosen.readlink()}, "
            f"where nothing is; make that directory, or {_ANOTHER}"
        )
    return (
        f"the cold directory {chosen} does not exist or is no directory: create it with "
        f"mkdir -p, or {_ANOTHER}"
    )


def _shown(path: Path) -> str:
    """Return a path for a line of text: a name of thousands of letters is cut."""
    text = str(path)
    return text if len(text) <= 200 and text.isprintable() else f"{text[:200]!a}..."


# --- Drives and file systems ---

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})


@dataclass(frozen=True)
class DriveFacts:
    """What the cold pool's directory stands on.

    Parameters
    ----------
    filesystem
        Type of the file system as the kernel calls it.
    free_bytes
        Room that an ordinary user may take.
    io_mode
        Result of writing and reading one 4 KiB block: direct or buffered.
    """

    directory: Path
    filesystem: str
    free_bytes: int
    io_mode: IOMode

    @classmethod
    def probe(cls, directory: Path, calls: DriveCalls | None = None) -> DriveFacts:
        """Look at an existing directory and try one block in it.

        Parameters
        ----------
        calls
            How the drive is reached; the operating system itself where None.

        Raises
        ------
        ColdPoolError
            Where the directory cannot hold a file.
        """
        room = os.statvfs(directory)
        return cls(
            directory=directory,
            filesystem=filesystem_of(directory),
            free_bytes=room.f_bavail * room.f_frsize,
            io_mode=probe_io_mode(directory, calls),
        )

    @property
    def warning(self) -> str | None:
        """Why rows kept here do not do what a drive is for; None where all is well."""
        in_memory = memory_warning(self.directory, self.filesystem)
        if in_memory is not None:
            return in_memory
        if is_network(self.filesystem):
            return (
                f"{self.directory} is on {self.filesystem}, a network: reads will be slow; choose "
                "a local drive with --cold-dir"
            )
        if self.io_mode is IOMode.BUFFERED:
            return f"{self.filesystem}: {buffered_warning(self.directory)}"
        return None


def memory_warning(directory: Path, filesystem: str) -> str | None:
    """Return that a directory is memory by its type of file system; None where it is a drive."""
    if filesystem not in _IN_MEMORY:
        return None
    return (
        f"{directory} is {filesystem}, which is memory and not a drive: the cold pool saves "
        "nothing there; choose another with --cold-dir"
    )


def is_network(filesystem: str) -> bool:
    """Return whether a type of file system is one of other machines."""
    return filesystem in _NETWORK


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that `path` lies on, `unknown` where that is not told."""
    resolved = path.resolve()
    depths = {str(one): len(one.parts) for one in (resolved, *resolved.parents)}
    best, kind = 0, "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        depth = depths.get(_unescape(before.split()[4]), 0)
        # The last mount on a point hides the earlier ones, hence >=.
        if depth and depth >= best:
            best, kind = depth, after.split()[0]
    return kind


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), text)


# --- What several processes change ---

# So often whoever waits for another process looks again.
_LOOK_SECONDS = 0.005


@contextmanager
def alone_in(place: Path, calls: DriveCalls) -> Iterator[None]:
    """Wait until no other process is in here with a file or directory, and let none in.

    Raises
    ------
    OSError
        Where it cannot be opened or locked.
    """
    descriptor = calls.open(place, os.O_RDONLY)
    try:
        while True:
            with suppress(BlockingIOError):
                calls.lock(descriptor)
                break
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        calls.close(descriptor)


def put_in_place(path: Path, data: bytes, calls: DriveCalls) -> None:
    """Write a small file that is there as a whole or not at all; OSError where that fails.

    It is on the drive then, under its name. One process at a time.
    """
    beside = path.with_suffix(".new")
    descriptor = calls.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    try:
        if calls.pwrite(descriptor, memoryview(data), 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(beside))
        calls.fsync(descriptor)
    finally:
        calls.close(descriptor)
    calls.rename(beside, path)
    keep_names(path.parent, calls)


# What file systems say that keep a directory's names without being asked, or have no way to ask.
_NOT_ASKED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})


def keep_names(directory: Path, calls: DriveCalls) -> None:
    """Wait until the names that a directory has are on the drive; OSError where that fails.

    A file that was synced has its content after a power failure, and its new name only then.
    """
    descriptor = calls.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_ASKED:
            raise
    finally:
        with suppress(OSError):
            calls.close(descriptor)
