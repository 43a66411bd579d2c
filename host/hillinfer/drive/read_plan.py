# SPDX-License-Identifier: Apache-2.0
"""Turns scattered rows into few aligned reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
