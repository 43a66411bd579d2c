# SPDX-License-Identifier: Apache-2.0
"""Landing in numpy and threads of Python: what the native library's is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.checksums import sums_of
from hillinfer.drive.files import PAGE_BYTES
from hillinfer.drive.landing import JOIN_GAP_BYTES, MAX_READ_BYTES, FileRows, Landed
from hillinfer.drive.shared_files import ReadFile
from hillinfer.trace.recorder import ReadCost

# --- The plan ---


@dataclass(frozen=True)
class ReadBatch(Reads):
    """Reads that fit one buffer together.

    Parameters
    ----------
    file_offsets, buffer_offsets, byte_counts
        As there, multiples of the unit.
    wanted
        Indices of the rows this batch brings, into the array the plan was made from.
    row_offsets
        Where each of them starts in the buffer.
    """

    wanted: NDArray[np.int64]
    row_offsets: NDArray[np.int64]


def offsets_of(wanted: FileRows) -> NDArray[np.int64]:
    """Return the byte of the file that each row starts at, int64."""
    if wanted.starts is None:
        return wanted.rows * wanted.row_bytes
    return wanted.starts[wanted.rows // 64] + wanted.rows % 64 * wanted.row_bytes


def plan_reads(
    rows: NDArray[np.int64],
    row_bytes: int,
    buffer_bytes: int,
    offsets: NDArray[np.int64] | None = None,
    unit_bytes: int = PAGE_BYTES,
) -> Iterator[ReadBatch]:
    """Plan aligned, joined reads of the rows at the given places of a file.

    Parameters
    ----------
    rows
        int64 row numbers of the file, in any order, each once.
    row_bytes
        Bytes of a row; row r starts at r * row_bytes.
    buffer_bytes
        Size of the buffer, at least one row and two pages.
    offsets
        The byte of the file that each row starts at, where it is another.
    unit_bytes
        What reads begin and end at multiples of.
    """
    offsets = rows * row_bytes if offsets is None else offsets
    order = np.argsort(offsets, kind="stable")
    first = offsets[order]
    start = first // unit_bytes * unit_bytes
    end = -(-(first + row_bytes) // unit_bytes) * unit_bytes
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


def plan_in_place(
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    row_bytes: int,
    offsets: NDArray[np.int64] | None = None,
) -> Reads:
    """Plan reads of rows to their places; neighbours in file and memory are read together.

    Parameters
    ----------
    rows
        int64 row numbers of the file, in any order, each once; one at least.
    places
        int64, which row of the buffer each of them becomes.
    row_bytes
        Bytes of a row, a multiple of 4,096.
    offsets
        As above.
    """
    offsets = rows * row_bytes if offsets is None else offsets
    order = np.argsort(offsets, kind="stable")
    offsets, places = offsets[order], places[order]
    neighbours = (np.diff(offsets) == row_bytes) & (np.diff(places) == 1)
    heads = np.append(0, np.flatnonzero(~neighbours) + 1)
    sizes = np.diff(heads, append=len(rows)) * row_bytes
    return Reads(*_in_pieces(offsets[heads], places[heads] * row_bytes, sizes))


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


# --- Threads of Python ---


class ThreadEngine:
    """A `ReadEngine` of ordinary reads, one at a time in each of several threads of Python.

    Parameters
    ----------
    threads
        Reads in flight.
    """

    name, in_library = "threads", None

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hillinfer-read")

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""
        view = buffer.data

        def read_share(share: int) -> None:
            for i in range(share, len(reads), self._threads):
                at, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
                file.read(view[at : at + count], int(reads.file_offsets[i]))

        if len(reads) <= 1:
            read_share(0)
            return
        shares = min(self._threads, len(reads))
        running = [self._pool.submit(read_share, share) for share in range(shares)]
        # All of them, before any error or interrupt goes on: a read still under way would fill the
        # buffer of the next.
        try:
            wait(running)
        except BaseException:
            wait(running)
            raise
        for one in running:
            one.result()

    def land(self, file: ReadFile, wanted: FileRows) -> Landed:
        """Bring rows to their places; see `ReadEngine`."""
        cost, out = ReadCost(), wanted.out
        if len(wanted.places) and not 0 <= wanted.places.min() <= wanted.places.max() < len(out):
            raise IndexError("a row has no place, or no checksum")
        if wanted.lie_in_pages and len(wanted.rows):
            in_place = plan_in_place(
                wanted.rows, wanted.places, wanted.row_bytes, offsets_of(wanted)
            )
            self.read(file, out.reshape(-1), in_place)
            cost += _cost(in_place)
        elif len(wanted.rows):
            # Rows start at multiples of 64 bytes, so a view of all such places has them as rows.
            at_64 = np.lib.stride_tricks.as_strided(
                wanted.buffer,
                shape=((len(wanted.buffer) - wanted.row_bytes) // 64 + 1, wanted.row_bytes),
                strides=(64, 1),
                writeable=False,
            )
            size = len(wanted.buffer)
            unit = wanted.unit_bytes if wanted.seals is None else PAGE_BYTES
            given = wanted.rows, wanted.row_bytes, size, offsets_of(wanted)
            for batch in plan_reads(*given, unit):
                self.read(file, wanted.buffer, batch)
                cost += _cost(batch)
                out[wanted.places[batch.wanted]] = at_64[batch.row_offsets // 64]
        if wanted.coming is not None:
            wanted.coming.come(out, wanted.places)
        differs = np.zeros(len(wanted.rows), bool)
        if wanted.sums is not None:
            differs = sums_of(out, wanted.places) != wanted.sums[wanted.rows]
        return Landed(cost, int(differs.argmax()) if differs.any() else None)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)


def _cost(reads: Reads) -> ReadCost:
    return ReadCost(len(reads), int(reads.byte_counts.sum()))
