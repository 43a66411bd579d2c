# SPDX-License-Identifier: Apache-2.0
"""Read-only files, such as those of sessions, that share a bounded number of descriptors."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import IOMode
from hillinfer.errors import HillInferError

# --- Files that share descriptors ---

Result = TypeVar("Result")

# One of so many descriptors of the process; the others are its own, a cold pool's and a session's
# that is being opened.
_SHARE = 4


class OpenFiles:
    """Keeps at most so many descriptors open that nobody uses now; the longest unused close first.

    Attributes
    ----------
    changing
        Held while any of the files is opened or closed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Held for moments; a signal's handler may use a file while its thread holds it.
        self.changing = threading.RLock()
        # Those that are open and may be closed, the longest unused first.
        self._open: OrderedDict[ReopenedFile, None] = OrderedDict()

    @classmethod
    def of_process(cls) -> OpenFiles:
        """Return one that keeps a share of the descriptors that the process may have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft // _SHARE))

    def note_used(self, file: ReopenedFile) -> None:
        """Learn that a file is open and was used last."""
        self._open[file] = None
        self._open.move_to_end(file)
        self.trim()

    def forget(self, file: ReopenedFile) -> None:
        """Learn that a file is closed, or must not be closed from here."""
        self._open.pop(file, None)

    def trim(self) -> None:
        """Close what is too much."""
        if len(self._open) <= self.most:
            return
        for file in list(self._open):
            if file.rest() and len(self._open) <= self.most:
                return

    def rest_all(self) -> bool:
        """Close all that nobody reads now, and say whether there were any."""
        closed = [file.rest() for file in list(self._open)]
        return any(closed)


class ReopenedFile:
    """A file that is open while it is read, and for as long after that as there is room.

    Parameters
    ----------
    descriptor
        Of the open file.
    reopen
        Opens it again and returns its descriptor.
    refused
        Makes an error of that which says why it cannot be opened.
    """

    def __init__(
        self,
        descriptor: int,
        reopen: Callable[[], int],
        refused: Callable[[OSError], Exception],
        close: Callable[[int], None],
    ) -> None:
        self._descriptor = descriptor
        self._reopen = reopen
        self._refused = refused
        self._close = close
        self._users = 0
        self._pinned = False
        self._closed = False
        # Its own, until it shares one.
        self._files = OpenFiles(1)

    def share(self, files: OpenFiles) -> None:
        """Be one of several files that share descriptors from here on; nobody reads it now."""
        with files.changing:
            self._files = files
            if self._descriptor >= 0 and not self._pinned:
                files.note_used(self)

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with a descriptor that stays open meanwhile, and return what it returns.

        No context manager, for the reason that `EngineGate` gives.
        """
        lent, files = False, self._files
        try:
            with files.changing:
                self._users += 1
                lent = True
                descriptor = self._opened()
            return use(descriptor)
        finally:
            if lent:
                with files.changing:
                    self._users -= 1
                    if self._closed:
                        self.rest()
                    else:
                        files.trim()

    def pin(self) -> int:
        """Return a descriptor that stays open until `close`."""
        with self._files.changing:
            self._users += 1
            try:
                descriptor = self._opened()
                self._pinned = True
                self._files.forget(self)
                return descriptor
            finally:
                self._users -= 1

    def close(self) -> None:
        """Close the file, once nobody reads it any more; harmless when done twice."""
        with self._files.changing:
            self._closed, self._pinned = True, False
            self.rest()

    def rest(self) -> bool:
        """Give the descriptor back if nobody uses it, and say whether that was so."""
        if self._descriptor < 0 or self._users or self._pinned:
            return False
        descriptor, self._descriptor = self._descriptor, -1
        self._files.forget(self)
        self._close(descriptor)
        return True

    def _opened(self) -> int:
        try:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._descriptor < 0:
                self._descriptor = self._opened_again()
        except OSError as error:
            raise self._refused(error) from error
        if not self._pinned:
            self._files.note_used(self)
        return self._descriptor

    def _opened_again(self) -> int:
        try:
            return self._reopen()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files.rest_all():
                raise
        return self._reopen()


# --- Files of saved sessions ---

Base = TypeVar("Base", "RowBase", "ShadowBase")


class ReadFile(Protocol):
    """A file that bytes are read from."""

    @property
    def descriptor(self) -> int:
        """Number of the open file, for who reads it by itself; it stays open until `close`."""

    @property
    def read_unit(self) -> int:
        """Bytes that offsets and lengths of reads are multiples of, at most a page."""

    def lend(self, use: Callable[[int], Result]) -> Result:
        """Call `use` with a descriptor that stays open meanwhile, and return what it returns."""

    def changed(self, byte_count: int, offset: int) -> HillInferError:
        """Return the error that says that bytes are not those that were written."""

    def read(self, into: memoryview, offset: int) -> None:
        """Fill all of `into` from `offset`, or raise an error naming file and bytes."""

    def close(self) -> None:
        """Close the file; harmless when done twice."""


@dataclass(frozen=True)
class RowBase:
    """A run of groups in every layer.

    Parameters
    ----------
    files
        One per layer; group i of them starts at byte i · 64 · row_bytes.
    sums
        Checksums of the rows of each layer, uint32, from whoever verified the files; None where
        they are known to the store.
    key
        Equal to that of another base where both are the same files with the same content; None
        where nobody else can have them.
    """

    files: Sequence[ReadFile]
    count: int
    io_mode: IOMode
    sums: Sequence[NDArray[np.uint32]] | None = None
    key: Hashable = None

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        for file in self.files:
            file.close()


@dataclass(frozen=True)
class ShadowBase:
    """A run of slots of the shadow.

    Parameters
    ----------
    file
        Slot i of them starts at byte i · slot_bytes.
    sums
        Checksums of the slots, uint32, or None.
    key
        As for rows.
    """

    file: ReadFile
    count: int
    slot_bytes: int
    sums: NDArray[np.uint32] | None = None
    key: Hashable = None

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        self.file.close()


@dataclass(frozen=True)
class StoredBase:
    """What a runtime may read of a saved session."""

    rows: RowBase
    shadow: ShadowBase

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        self.rows.close()
        self.shadow.close()


def begins_like(wanted: Base, known: Mapping[int, Base]) -> int | None:
    """Return where a base of the same files with at least as much to read begins, or None.

    Parameters
    ----------
    wanted
        Of which files.
    known
        Bases by their first group or slot.
    """
    for first, own in known.items():
        if wanted.key is not None and own.key == wanted.key and own.count >= wanted.count:
            return first
    return None
