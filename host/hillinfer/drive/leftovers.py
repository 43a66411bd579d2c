# SPDX-License-Identifier: Apache-2.0
"""Scratch files and directories that need a name, and removing those of dead processes."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hillinfer.drive.calls import DriveCalls

_NAME = re.compile(r"\.hillinfer-[0-9a-f]{24}\.scratch")
_ATTEMPTS = 100


@dataclass
class ScratchPath:
    """A named scratch file or directory of this process, held by a lock.

    The lock goes with the process, however it ends; `sweep` then removes what it left. On file
    systems that know no locks nothing is held and nothing is swept.

    Parameters
    ----------
    path
        Where it lies. It may be renamed: the lock stays with the file, not with the name.
    descriptor
        Of the file or directory, open for reading (a file for writing too).
    calls
        How the drive is reached.
    """

    path: Path
    descriptor: int
    calls: DriveCalls = field(default_factory=DriveCalls)

    @classmethod
    def make_file(cls, parent: Path, calls: DriveCalls) -> ScratchPath:
        """Make an empty owner-only file in a directory; OSError where that fails."""
        return cls._make(
            parent, calls, lambda path: calls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        )

    @classmethod
    def make_directory(cls, parent: Path, calls: DriveCalls) -> ScratchPath:
        """Make an empty owner-only directory in another; OSError where that fails."""

        def make(path: Path) -> int:
            calls.mkdir(path)
            try:
                return calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise
            except BaseException:
                with suppress(OSError):
                    calls.rmdir(path)
                raise

        return cls._make(parent, calls, make)

    @classmethod
    def _make(cls, parent: Path, calls: DriveCalls, make: Callable[[Path], int]) -> ScratchPath:
        missing: FileNotFoundError | None = None
        for _ in range(_ATTEMPTS):
            path = parent / f".hillinfer-{secrets.token_hex(12)}.scratch"
            try:
                descriptor = make(path)
            except FileNotFoundError as error:
                # Swept between being made and being opened, unless the parent itself is missing.
                if parent.is_dir():
                    missing = error
                    continue
                raise
            try:
                if _hold(path, descriptor, calls):
                    return cls(path, descriptor, calls)
            except BaseException:
                _close(descriptor, calls)
                with suppress(OSError):
                    _remove(path)
                raise
            # A sweep was faster than the lock and removes it: take another name.
            _close(descriptor, calls)
        if missing is not None:
            # Some file systems of the kernel, such as /proc, take no file and say so in this way.
            raise OSError(errno.EOPNOTSUPP, "it takes no files", str(parent)) from missing
        raise OSError(errno.EEXIST, "no scratch name can be held there", str(parent))

    def remove(self) -> None:
        """Remove what still has the scratch name and give up the lock; harmless when done twice."""
        if self.descriptor >= 0:
            with suppress(OSError):
                if _is_still(self.path, self.descriptor):
                    _remove(self.path)
            self.release()

    def release(self) -> None:
        """Give up the lock and leave what it held, which was renamed, where it is."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            _close(descriptor, self.calls)


def sweep(directory: Path, calls: DriveCalls | None = None, user: int | None = None) -> list[Path]:
    """Remove the scratch files and directories of dead processes and return their paths.

    Touches only names that `ScratchPath` gives, only what belongs to the user, and only what no
    living process holds; follows no symbolic links. What cannot be looked at or removed stays.

    Parameters
    ----------
    directory
        Where scratch lies, itself and not what is below.
    calls
        How the drive is reached; the operating system itself where None.
    user
        Whose they are, by number; this process's where None.
    """
    reached, owner = calls or DriveCalls(), os.geteuid() if user is None else user
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    return [directory / name for name in names if _sweep_one(directory / name, reached, owner)]


def _sweep_one(path: Path, calls: DriveCalls, owner: int) -> bool:
    try:
        if not _is_own(path.lstat(), owner):
            return False
        # Whatever took the name's place since then is not followed and does not block.
        descriptor = calls.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # The lock shows that no owner lives; only what it is held on may be removed.
        calls.lock(descriptor)
        if not _is_own(os.fstat(descriptor), owner) or not _is_still(path, descriptor):
            return False
        _remove(path)
    except OSError:
        return False
    finally:
        _close(descriptor, calls)
    return True


def _hold(path: Path, descriptor: int, calls: DriveCalls) -> bool:
    """Lock what was just made and say whether it is still there; a sweep may have come between."""
    try:
        calls.lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        # No locks here, so a sweep cannot lock it either and leaves it alone.
        return True
    return _is_still(path, descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _is_own(status: os.stat_result, owner: int) -> bool:
    is_scratch = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_scratch and status.st_uid == owner


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        try:
            shutil.rmtree(path)
        except OSError:
            # To list it takes descriptors, of which there may be none; an empty one goes without.
            path.rmdir()
    else:
        path.unlink()


def _close(descriptor: int, calls: DriveCalls) -> None:
    with suppress(OSError):
        calls.close(descriptor)
