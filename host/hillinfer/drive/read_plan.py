# SPDX-License-Identifier: Apache-2.0
"""Turns scattered rows into few aligned reads, and lets reads on demand go first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES

# A random read costs about as much as streaming a few pages, so reading through a small gap is
# cheaper than a second read. Gaps of 4 to 16 KiB measure alike; larger ones waste bandwidth.
JOIN_GAP_BYTES = 8 * 1024
MAX_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class ReadBatch(Reads):
    """Reads that fit one buffer together.

    Parameters
    ----------
    file_offsets, buffer_offsets, byte_counts
        As there, multiples of 4,096.
    wanted
        Indices of the rows this batch brings, into the array the plan was made from.
    row_offsets
        Where each of them starts in the buffer.
    """

    wanted: NDArray[np.int64]
    row_offsets: NDArray[np.int64]


def plan_reads(rows: NDArray[np.int64], row_bytes: int, buffer_bytes: int) -> Iterator[ReadBatch]:
    """Plan aligned, joined reads of the rows at the given places of a file.

    Parameters
    ----------
    rows
        int64 row numbers of the file, in any order, each once.
    row_bytes
        Bytes of a row; row r starts at r * row_bytes.
    buffer_bytes
        Size of the buffer, at least one row and two pages.
    """
    order = np.argsort(rows, kind="stable")
    first = rows[order] * row_bytes
    start = first // PAGE_BYTES * PAGE_BYTES
    end = -(-(first + row_bytes) // PAGE_BYTES) * PAGE_BYTES
    if not len(order):
        return
    # Once for all batches: a thread of Python plans while another computes.
    new_read = np.ones(len(order), dtype=bool)
    new_read[1:] = start[1:] > end[:-1] + JOIN_GAP_BYTES
    grown = end - start
    np.copyto(grown[1:], end[1:] - end[:-1], where=~new_read[1:])
    used = grown.cumsum()
    begin = 0
    while begin < len(order):
        # A batch begins with a read of its own; its reads, packed one behind the other, must fit
        # the buffer.
        new_read[begin] = True
        own = int(end[begin] - start[begin])
        most = buffer_bytes - own + int(used[begin])
        stop = max(begin + 1, int(used.searchsorted(most, side="right")))
        yield _batch(order, first, start, end, new_read[begin:stop], begin)
        begin = stop


def lie_in_pages(rows: NDArray[np.uint8]) -> bool:
    """Return whether rows can be read to their places without a buffer in between.

    Reads of rows that are longer than a gap join nothing but neighbours either way.

    Parameters
    ----------
    rows
        uint8 of shape (any, row_bytes), where they go in memory.
    """
    row_bytes = rows.shape[1]
    return (
        row_bytes > JOIN_GAP_BYTES
        and row_bytes % PAGE_BYTES == 0
        and rows.ctypes.data % PAGE_BYTES == 0
        and rows.flags.c_contiguous
    )


def plan_in_place(rows: NDArray[np.int64], places: NDArray[np.int64], row_bytes: int) -> Reads:
    """Plan reads of rows to their places; neighbours in file and memory are read together.

    Parameters
    ----------
    rows
        int64 row numbers of the file, in any order, each once; one at least.
    places
        int64, which row of the buffer each of them becomes.
    row_bytes
        Bytes of a row, a multiple of 4,096.
    """
    order = np.argsort(rows, kind="stable")
    rows, places = rows[order], places[order]
    neighbours = (np.diff(rows) == 1) & (np.diff(places) == 1)
    heads = np.append(0, np.flatnonzero(~neighbours) + 1)
    sizes = np.diff(heads, append=len(rows)) * row_bytes
    return Reads(*_in_pieces(rows[heads] * row_bytes, places[heads] * row_bytes, sizes))


def _batch(
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    new_read: NDArray[np.bool_],
    begin: int,
) -> ReadBatch:
    stop = begin + len(new_read)
    heads = np.flatnonzero(new_read)
    read_start = start[begin:stop][heads]
    read_end = end[begin:stop][np.append(heads[1:], len(new_read)) - 1]
    sizes = read_end - read_start
    buffer_start = np.cumsum(sizes) - sizes
    read_of_row = np.cumsum(new_read) - 1
    row_offsets = first[begin:stop] - read_start[read_of_row] + buffer_start[read_of_row]
    return ReadBatch(
        *_in_pieces(read_start, buffer_start, sizes),
        wanted=order[begin:stop],
        row_offsets=row_offsets,
    )


def _in_pieces(
    starts: NDArray[np.int64], places: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut long reads; return file offsets, buffer offsets and byte counts."""
    pieces = -(-sizes // MAX_READ_BYTES)
    piece = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skipped = piece * MAX_READ_BYTES
    return (
        np.repeat(starts, pieces) + skipped,
        np.repeat(places, pieces) + skipped,
        np.minimum(np.repeat(sizes, pieces) - skipped, MAX_READ_BYTES),
    )


_Read = TypeVar("_Read")


class ReadTurns:
    """A lock that reads on demand get before reads ahead.

    Attention waits for what it demands, while what is read ahead has until the next layer. No read
    is broken off: who reads ahead takes a turn for each of many pieces.

    Who reads on demand may be interrupted by Ctrl-C anywhere; a turn ends, and others are told, all
    the same. So these are no context managers: between the frames of one, an interrupt would leave
    the turn taken for as long as its traceback lives. Reads ahead are another thread's.

    Parameters
    ----------
    changed
        What those wait for who have no turn yet; one of its own where None.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self._changed = threading.Condition() if changed is None else changed
        self._taken = False
        self._demanded = 0

    def demand(self) -> None:
        """Let nobody read ahead until `satisfy`, between the turns of one who has several."""
        noted = 0
        try:
            with self._changed:
                self._demanded += 1
                noted = 1
        except BaseException:
            self._demanded -= noted
            self.wake()
            raise

    def satisfy(self) -> None:
        """Take a demand back."""
        with self._changed:
            self._demanded -= 1
            self._changed.notify_all()

    def on_demand(self, read: Callable[[], _Read]) -> _Read:
        """Wait for the end of the turn under way, at most, and read in the next one."""
        is_mine = False
        try:
            with self._changed:
                self._demanded += 1
                try:
                    self._changed.wait_for(lambda: not self._taken)
                    self._taken = is_mine = True
                finally:
                    self._demanded -= 1
            return read()
        finally:
            if is_mine:
                self._taken = False
            # Also where it never came: who reads ahead may have looked while it was wanted.
            self.wake()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Wait until nobody reads or wants to read on demand, and have a turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._demanded)
            self._taken = True
        try:
            yield
        finally:
            self._taken = False
            self.wake()

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()
