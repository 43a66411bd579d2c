# SPDX-License-Identifier: Apache-2.0
"""Page-aligned memory, scratch that is swept, and nameless files that are read past the cache."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import SHORTAGE, ColdPoolError, reason_of, way_out
from hillinfer.system.kept_memory import HUGE_BYTES

# --- Page-aligned memory ---

# What direct I/O reads into and writes from.
PAGE_BYTES = mmap.PAGESIZE


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def aligned_buffer(byte_count: int) -> NDArray[np.uint8]:
    """Return a page-aligned uint8 array of `byte_count` rounded up to whole pages.

    Pages take memory only once they are touched. Huge ones are asked for as far as they lie within
    the array: a drive is told of each page, which takes two fifths of a read of 64 KiB.
    """
    size = round_up(max(byte_count, 1), PAGE_BYTES)
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < HUGE_BYTES:
        return np.frombuffer(private_memory(size), dtype=np.uint8)
    mapping = private_memory(size + HUGE_BYTES)
    start = -int(np.frombuffer(mapping, np.uint8).ctypes.data) % HUGE_BYTES
    with suppress(OSError):  # A kernel without them.
        mapping.madvise(advice, start, size // HUGE_BYTES * HUGE_BYTES)
    return np.frombuffer(mapping, np.uint8, size, start)


def private_memory(byte_count: int) -> mmap.mmap:
    """Return anonymous memory of `byte_count` rounded up to whole pages.

    Private, because only then does MADV_DONTNEED give pages back: those of a shared mapping, which
    is what `mmap` makes by default, stay in memory.
    """
    return mmap.mmap(
        -1,
        round_up(max(byte_count, 1), PAGE_BYTES),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )


# --- Scratch files and directories that have a name ---

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


# --- Nameless files ---

Result = TypeVar("Result")

# What bytes that differ from what was written mean; the directory and the fix come around it.
CHANGED = (
    "the drive gave other bytes, or somebody changed the file; neither the model nor the text so "
    "far is at fault; check the drive (dmesg, smartctl)"
)


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
        Direct or buffered I/O; direct needs offsets, lengths and buffers aligned to 4,096 bytes, or
        of reads to less where the file system says so.
    label
        What the file holds, for errors: `rows of layer 3`.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    ColdPoolError
        Where the directory cannot hold a file.

    Attributes
    ----------
    read_unit
        Bytes that offsets and lengths of reads are multiples of. What is read through the page
        cache comes in pages.
    """

    def __init__(
        self,
        directory: Path,
        mode: IOMode,
        label: str = "rows",
        calls: DriveCalls | None = None,
    ) -> None:
        self._directory = directory
        self._label = label
        self._mode = mode
        self._calls = calls or DriveCalls()
        self._unit = PAGE_BYTES if mode is IOMode.DIRECT else 1
        self._length = 0
        self._descriptor = _open_nameless(
            directory, os.O_DIRECT if mode is IOMode.DIRECT else 0, self._calls
        )
        self.read_unit = PAGE_BYTES
        if mode is IOMode.DIRECT:
            self.read_unit = self._calls.read_unit(self._descriptor)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, or raise ColdPoolError naming what failed.

        One thread at a time.
        """
        # A file that was cut short and then written on would read as zeros in between.
        self._check_length("write", len(data), offset)
        self._transfer("write", self._calls.pwrite, data, offset)
        if self._mode is IOMode.BUFFERED:
            # A page that the kernel fails to write later is dropped, and would read as zeros.
            self._attempt("write", len(data), offset, self._calls.fdatasync)
        self._length = max(self._length, offset + len(data))

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise ColdPoolError naming what failed."""
        self._transfer("read", self._calls.preadv, into, offset)

    def changed(self, byte_count: int, offset: int) -> ColdPoolError:
        """Return the error that says that bytes are not those that were written."""
        return ColdPoolError(
            f"{byte_count} bytes at {offset} of {self._label} of the cold pool in "
            f"{self._directory} are not what was written there: {CHANGED}, and ask again, with "
            "another --cold-dir if it comes again"
        )

    def publish(self, path: Path) -> None:
        """Give the file a name, its content on the drive; OSError where that cannot be."""
        self._calls.fsync(self._descriptor)
        self._calls.link(self._descriptor, path)

    @property
    def descriptor(self) -> int:
        """Number of the open file, for what reads it by itself: a device."""
        return self._descriptor

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with the descriptor, which stays open, and return what it returns."""
        return use(self._descriptor)

    def close(self) -> None:
        """Give the file's space back; harmless when done twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            # The descriptor is gone even where closing fails, and so is all that it stood for.
            with suppress(OSError):
                self._calls.close(descriptor)

    def _transfer(
        self,
        verb: str,
        call: Callable[[int, memoryview, int], int],
        data: memoryview,
        offset: int,
    ) -> None:
        done = reached = 0
        while done < len(data):
            try:
                count = call(self._descriptor, data[done:], offset + done)
            except OSError as error:
                raise self._failure(verb, len(data), offset, reached, error) from error
            if done + count <= reached:
                self._check_length(verb, len(data), offset, reached)
                stuck = OSError(errno.EIO, "no progress")
                raise self._failure(verb, len(data), offset, reached, stuck)
            reached = done + count
            # Direct I/O may stop anywhere but must go on at a multiple of 4,096.
            done = reached if reached == len(data) else reached // self._unit * self._unit

    def _check_length(self, verb: str, count: int, offset: int, done: int = 0) -> None:
        """Refuse to go on with a file that lost its end."""
        is_read = verb == "read"
        expected = max(self._length, offset + count) if is_read else self._length
        length = self._attempt(verb, count, offset, self._calls.size)
        if length < expected:
            short = OSError(errno.EIO, f"the file is {length} bytes long and should be {expected}")
            raise self._failure(verb, count, offset, done, short)

    def _attempt(self, verb: str, count: int, offset: int, call: Callable[[int], Result]) -> Result:
        try:
            return call(self._descriptor)
        except OSError as error:
            raise self._failure(verb, count, offset, 0, error) from error

    def _failure(
        self, verb: str, count: int, offset: int, done: int, error: OSError
    ) -> ColdPoolError:
        return ColdPoolError(
            f"could not {verb} {count} bytes at {offset} of {self._label} of the cold pool in "
            f"{self._directory} ({done} bytes done): {reason_of(error)}; "
            f"{way_out(error, 'choose another --cold-dir')}"
        )


def probe_io_mode(directory: Path, calls: DriveCalls | None = None) -> IOMode:
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
            file = ColdFile(directory, mode, "a block to try", calls)
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


def buffered_warning(directory: Path) -> str:
    """Return what it costs that a directory does not allow direct I/O, and the way out."""
    return (
        f"{directory} does not allow direct I/O: rows are read and written through the page cache, "
        "which holds memory that the DRAM budget does not count, and every write waits for the "
        "drive; choose another directory with --cold-dir (cold_dir in Python)"
    )


def _open_nameless(directory: Path, extra_flags: int, calls: DriveCalls) -> int:
    flags = os.O_RDWR | extra_flags
    try:
        return calls.open(directory, flags | os.O_TMPFILE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _unusable(directory, error) from error
    # Some file systems know no nameless files: name one and take the name away at once.
    try:
        named = ScratchPath.make_file(directory, calls)
        try:
            return calls.open(named.path, flags | os.O_NOFOLLOW)
        finally:
            named.remove()
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> ColdPoolError:
    reason = reason_of(error)
    if error.errno in SHORTAGE:
        reason = f"cannot open another of its files, one per layer: {reason}"
    return ColdPoolError(
        f"cannot keep the cold pool in {directory}: {reason}; "
        f"{way_out(error, 'choose a writable directory on a drive with --cold-dir')}"
    )
