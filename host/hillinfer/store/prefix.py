# SPDX-License-Identifier: Apache-2.0
"""A stored prefix that was found: its chunks, leased, and reading their rows in long runs."""

from __future__ import annotations

import errno
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.arrived_rows import ArrivedRows, PrefixSums, Taker
from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.secrecy.library import WrongTagError
from hillinfer.secrecy.pages import Pages, PlainPages
from hillinfer.store.database import Chunk
from hillinfer.store.extent import Sheet
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    READS_IN_FLIGHT,
    WAITING_BYTES,
    ExtentShape,
    RowPiece,
    group_sums,
    pieces_of,
    waiting_pieces,
)
from hillinfer.store.pool_files import READ_BYTES, PoolFile
from hillinfer.system.kept_memory import BLOCK_BYTES, KeptMemory
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Pieces that are read at once: while the last reads of one end, those of the others keep the drive
# busy. One at a time gives 0.75 of what three give.
_PIECES_AT_ONCE = 3
# Rows that wait for a pass, in so many pieces; each wakes several threads beside that pass.
_WAITING_PIECES = 2
# The drive is fast enough with fewer reads in flight, and threads that place what they read make
# one piece after another.
_TAKEN_READS, _PLACED_READS = 2, 3
_LEAVING = Taker()
_Read = TypeVar("_Read")


def _never(layer: int) -> float:
    """Return the deadline of a layer that nobody waits for."""
    return math.inf


@dataclass(frozen=True)
class _Buffers:
    """Memory that pieces come into before somebody has them.

    Parameters
    ----------
    least, most
        How many; as many between as fit.
    fitting_bytes
        Of all of them.
    at_once
        Pieces that are read at once.
    """

    least: int = 3
    most: int = 6
    fitting_bytes: int = BLOCK_BYTES // 2
    at_once: int = _PIECES_AT_ONCE


# Small pieces come in more buffers, in memory that was touched before.
_LEAVING_BUFFERS = _Buffers()
_WAITING_BUFFERS = _Buffers(least=2, most=16, fitting_bytes=BLOCK_BYTES)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a prefix.

    Parameters
    ----------
    record
        What the index says.
    sheet
        What the drive says.
    slot
        Which of its two sheets that is.
    groups
        How many of its groups belong to the prefix.
    pages
        What its pages go through when they are read.
    """

    record: Chunk
    sheet: Sheet
    slot: int
    groups: int
    pages: Pages = field(default_factory=PlainPages)

    @property
    def shape(self) -> ExtentShape:
        """Where its bytes lie."""
        return self.sheet.header.shape


class WrongBytesError(Exception):
    """A chunk is not as it was written.

    Parameters
    ----------
    chunk
        Which one.
    what
        Which part of it, for the message.
    """

    def __init__(self, chunk: StoredChunk, what: str) -> None:
        super().__init__(f"{what} of chunk {chunk.record.number} are not as they were written")
        self.chunk = chunk


class StoredPrefix:
    """The longest stored prefix of a prompt, whose chunks stay while it is open.

    Parameters
    ----------
    chunks
        In order; one at least.
    files
        The store's, by number of the drive.
    release
        Ends the lease.
    wrong
        Told of a chunk whose bytes are wrong, and of a drive that fails.
    count
        Takes amounts by the names of `StoreCounts`: rows that were read and are right, and waiting.
    memory
        What is read lies in meanwhile; its own where None.

    Attributes
    ----------
    tokens
        How many tokens it covers.
    """

    def __init__(
        self,
        chunks: Sequence[StoredChunk],
        files: Sequence[PoolFile],
        release: Callable[[list[int]], None],
        wrong: Callable[[WrongBytesError | OSError], None],
        count: Callable[..., None] = lambda **amounts: None,
        memory: KeptMemory | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.tokens = sum(chunk.groups for chunk in chunks) * GROUP_TOKENS
        self._files = files
        self._release = release
        self._wrong = wrong
        self._count = count
        self._memory = KeptMemory(0) if memory is None else memory
        self._is_open = True
        # Reads under way, which `stop` waits for.
        self._changed = threading.Condition()
        self._reading = 0

    def note_bubble(self, seconds: float) -> None:
        """Count what a pass waited for rows that stream."""
        self._count(bubble_seconds=seconds)

    @property
    def shape(self) -> ExtentShape:
        """Shape of its extents."""
        return self.chunks[0].shape

    @cached_property
    def _sums(self) -> PrefixSums:
        keys = [key for one in self.chunks for key in one.sheet.group_keys[: one.groups]]
        expected = [one.sheet.row_sums[:, : one.groups] for one in self.chunks]
        return PrefixSums(keys, np.concatenate(expected, axis=1))

    @property
    def byte_count(self) -> int:
        """Bytes of its rows in all layers."""
        return self.tokens * self.shape.layers * self.shape.row_bytes

    @property
    def cost(self) -> float:
        """Seconds that computing its rows took."""
        return sum(
            chunk.sheet.header.cost * chunk.groups / chunk.sheet.header.groups
            for chunk in self.chunks
        )

    def stream(
        self,
        first_layer: int = 0,
        chunks: int | None = None,
        deadline: Callable[[int], float] = _never,
        taker: Taker = _LEAVING,
    ) -> Generator[tuple[int, int, NDArray[np.uint8]], None, None]:
        """Yield all rows, layer by layer, as the drive gives them in long reads.

        Checked: what is not as it was written is not yielded.

        Parameters
        ----------
        first_layer
            Where to begin.
        chunks
            How many of its chunks; all where None.
        deadline
            Says when a layer's rows are wanted, in seconds of `time.monotonic`: where several
            prefixes come from one drive, what is wanted first is read first.
        taker
            Has rows before they are yielded.

        Yields
        ------
        A layer, the position of the first token, and rows, uint8 (tokens, row_bytes), valid until
        the next.

        Raises
        ------
        OSError, WrongBytesError
            Where a drive fails or gives other bytes.
        """
        count = len(self.chunks) if chunks is None else chunks
        if taker.most_layers is None:
            pieces, buffers = list(pieces_of(self.shape, first_layer, count)), _LEAVING_BUFFERS
        else:
            at_once = 1 if taker.places_reads else _PIECES_AT_ONCE
            reads = _PLACED_READS if taker.places_reads else _TAKEN_READS
            pieces = list(waiting_pieces(self.shape, first_layer, count, taker.most_layers, reads))
            own = sum(one.stop == self.shape.layers for one in pieces)
            most = min(_WAITING_BUFFERS.most, _WAITING_PIECES * own)
            buffers = replace(_WAITING_BUFFERS, most=most, at_once=at_once)
        size = max((one.byte_count for one in pieces), default=0)
        read = partial(self._read_rows, taker)
        for _, arrived in self._read_ahead(pieces, size, read, deadline, buffers, taker.settle):
            for one in arrived:
                if not one.is_checked:
                    one.check()
            for one in sorted(arrived, key=lambda own: own.layer):
                yield one.layer, one.position, one.rows

    def layers_ahead(self, chunks: int) -> int:
        """Return how many layers of its first chunks a stream's memory holds, read one by one."""
        together = max(1, min(chunks, WAITING_BYTES // self.shape.object_bytes))
        fitting = _WAITING_BUFFERS.fitting_bytes // (together * self.shape.object_bytes)
        return min(_WAITING_BUFFERS.most, fitting) // -(-chunks // together)

    def read_groups(
        self, chunk: StoredChunk, layer: int, first: int, into: NDArray[np.uint8]
    ) -> None:
        """Read and check rows of some groups of one chunk in a layer.

        Parameters
        ----------
        chunk, layer, first
            Which, and the first group.
        into
            uint8 (groups * 64, row_bytes), page-aligned.

        Raises
        ------
        OSError, WrongBytesError
            As from `stream`.
        """
        span = chunk.record.span
        at = chunk.shape.rows_at(layer, first)
        self._files[span.drive].read(into, span.offset + at)
        self._open_pages(chunk, at, into)
        self._arrived(layer, chunk.record.position, into, first).check()

    def shadows(
        self, numbers: Sequence[int]
    ) -> Generator[tuple[int, NDArray[np.uint8]], None, None]:
        """Yield the shadow planes of some chunks, checked, while those of the next come.

        Parameters
        ----------
        numbers
            Which of the prefix, in this order; all of them have one.

        Yields
        ------
        The number, and uint8 (layers, shadow_bytes), valid until the next.

        Raises
        ------
        OSError, WrongBytesError
            As from `stream`.
        """
        layers = self.shape.layers
        size = layers * self.shape.shadow_bytes
        pieces = [
            RowPiece(self.shape, 0, layers, range(one, one + 1), layers, READS_IN_FLIGHT)
            for one in numbers
        ]
        if not pieces:
            return
        for piece, planes in self._read_ahead(pieces, size, self._read_shadows):
            yield piece.chunks[0], planes.reshape(layers, -1)

    def pages_of(self, chunk: StoredChunk) -> Pages:
        """Return what a chunk's pages go through, its tags read; OSError where that fails."""
        self._read_tags([chunk])
        return chunk.pages

    def close(self) -> None:
        """Let the chunks be evicted; harmless when done twice."""
        if self._is_open:
            self._is_open = False
            self._release([chunk.record.number for chunk in self.chunks])

    def stop(self) -> None:
        """Read nothing from here on, because files are about to be closed; leases go with them."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._reading)

    def __enter__(self) -> StoredPrefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------

    def _read_ahead(
        self,
        pieces: Sequence[RowPiece],
        buffer_bytes: int,
        read: Callable[[RowPiece, NDArray[np.uint8], float], _Read],
        deadline: Callable[[int], float] = _never,
        buffers: _Buffers = _LEAVING_BUFFERS,
        settle: Callable[[_Read], bool] = lambda _: True,
    ) -> Iterator[tuple[RowPiece, _Read]]:
        """Yield pieces with what was read of each, valid until the next, while others come."""
        fitting = min(buffers.most, buffers.fitting_bytes // max(1, buffer_bytes))
        count = min(max(buffers.least, fitting), len(pieces))
        size = round_up(buffer_bytes, PAGE_BYTES)
        memory = self._memory.taken(count * size)
        free = deque(memory[at * size : at * size + buffer_bytes] for at in range(count))
        coming: deque[tuple[RowPiece, NDArray[np.uint8], Future[_Read]]] = deque()
        left = iter(pieces)
        with ThreadPoolExecutor(buffers.at_once, "hillinfer-store-read") as ahead:
            try:
                while True:
                    while free and (piece := next(left, None)) is not None:
                        buffer = free.popleft()
                        job = ahead.submit(self._bring, read, piece, buffer, deadline(piece.first))
                        coming.append((piece, buffer, job))
                    if not coming:
                        return
                    piece, buffer, job = coming.popleft()
                    is_free = settle(found := job.result())
                    yield piece, found
                    free.append(buffer if is_free else self._memory.taken(size)[:buffer_bytes])
            finally:
                for _, _, job in coming:
                    job.cancel()

    def _bring(
        self,
        read: Callable[[RowPiece, NDArray[np.uint8], float], _Read],
        piece: RowPiece,
        buffer: NDArray[np.uint8],
        deadline: float,
    ) -> _Read:
        """Read a piece, open its pages and compare it with its checksums, in a reading thread."""
        with self._changed:
            if not self._is_open:
                raise OSError(errno.EBADF, "the store was closed")
            self._reading += 1
        try:
            return read(piece, buffer, deadline)
        except OSError as error:
            self._wrong(error)
            raise
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def _read_rows(
        self, taker: Taker, piece: RowPiece, buffer: NDArray[np.uint8], deadline: float
    ) -> list[ArrivedRows]:
        """Read rows; the one place where bytes of a stream become rows."""
        self._read(piece, buffer, deadline, taker)
        self._read_tags([self.chunks[number] for number in piece.chunks])
        arrived: list[ArrivedRows] = []

        def opened() -> Iterator[ArrivedRows]:
            for run in piece.runs:
                for layer in range(piece.first, piece.stop):
                    for number in run if self.shape.tag_bytes else ():
                        own = self._rows(piece, buffer, layer, range(number, number + 1))
                        at = self.shape.rows_at(layer)
                        self._open_pages(self.chunks[number], at, own.reshape(-1))
                    rows = self._rows(piece, buffer, layer, run)
                    arrived.append(self._arrived(layer, run.start, rows))
                    yield arrived[-1]

        taker.take(opened())
        return arrived

    def _read(
        self, piece: RowPiece, buffer: NDArray[np.uint8], deadline: float, taker: Taker
    ) -> None:
        """Read a piece in long reads, all drives' one after the other."""
        is_placed = taker.places_reads and piece.joined == 1 and not self.shape.tag_bytes
        unit = self.shape.group_bytes if is_placed else 1
        most = max(1, READ_BYTES // unit) * unit
        chunks = [self.chunks[number] for number in piece.chunks]
        drives = [one.record.span.drive for one in chunks]
        offsets = [one.record.span.offset for one in chunks]
        groups = [one.groups for one in chunks]
        for drive in set(drives):
            own = (at for at, one in enumerate(drives) if one == drive)
            reads = piece.reads(offsets, groups, own, most)
            file, rows = self._files[drive], None
            if is_placed:
                at = reads.buffer_offsets + buffer.ctypes.data
                rows = taker.during(self._sums.read_rows(*piece.read_rows(reads), at))
            with file.turns.ahead(deadline):
                file.read_many(reads, buffer, piece.threads, piece.call_bytes, rows)

    def _read_tags(self, chunks: Sequence[StoredChunk]) -> None:
        """Read the tags of chunks that have none yet; those of a few chunks come together."""
        size = self.shape.tag_plane_bytes
        wanted = [chunk for chunk in chunks if chunk.pages.wants_tags]
        if not wanted:
            return
        memory = aligned_buffer(len(wanted) * size)
        for drive in {chunk.record.span.drive for chunk in wanted}:
            own = [at for at, chunk in enumerate(wanted) if chunk.record.span.drive == drive]
            offsets = [wanted[at].record.span.offset + self.shape.tags_at for at in own]
            reads = Reads(np.array(offsets), np.array(own) * size, np.full(len(own), size))
            self._files[drive].read_many(reads, memory, READS_IN_FLIGHT)
        for at, chunk in enumerate(wanted):
            chunk.pages.take_tags(memory[at * size : (at + 1) * size])

    def _open_pages(self, chunk: StoredChunk, at: int, data: NDArray[np.uint8]) -> None:
        self._read_tags([chunk])
        try:
            chunk.pages.open(at, data)
        except WrongTagError:
            self._fail(chunk, "pages")

    def _read_shadows(
        self, piece: RowPiece, buffer: NDArray[np.uint8], deadline: float
    ) -> NDArray[np.uint8]:
        """Read the shadow plane of one chunk; who takes it copies it meanwhile."""
        chunk = self.chunks[piece.chunks[0]]
        span, layers = chunk.record.span, self.shape.layers
        size = layers * self.shape.shadow_bytes
        reads = Reads.in_pieces(span.offset + self.shape.shadow_at(0), size, READ_BYTES)
        with self._files[span.drive].turns.ahead(deadline):
            self._files[span.drive].read_many(reads, buffer, READS_IN_FLIGHT)
        planes = buffer[:size]
        self._open_pages(chunk, chunk.shape.shadow_at(0), planes)
        own_salts = np.concatenate([chunk.sheet.shadow_salt(layer) for layer in range(layers)])
        differs = group_sums(planes, own_salts) != chunk.sheet.shadow_sums
        if differs.any():
            self._fail(chunk, f"the key shadows of layer {int(differs.argmax())}")
        return planes

    def _rows(
        self, piece: RowPiece, buffer: NDArray[np.uint8], layer: int, run: range
    ) -> NDArray[np.uint8]:
        """Return rows of a layer of some of a piece's chunks; of several if it has one layer."""
        shape, start = self.shape, piece.start(layer, run.start)
        groups = sum(self.chunks[number].groups for number in run)
        return buffer[start : start + groups * shape.group_bytes].reshape(-1, shape.row_bytes)

    def _arrived(self, layer: int, chunk: int, rows: NDArray[np.uint8], at: int = 0) -> ArrivedRows:
        """Return rows of neighbouring chunks, from some group of the one of some number on."""
        first = chunk * CHUNK_GROUPS + at
        own = slice(first, first + len(rows) // GROUP_TOKENS)
        sums = self._sums.salts[layer, own], self._sums.expected[layer, own]
        what = f"rows of layer {layer}"
        return ArrivedRows(
            layer, first * GROUP_TOKENS, rows, *sums, self._count,
            lambda group: self._fail(self.chunks[(first + group) // CHUNK_GROUPS], what),
        )  # fmt: skip

    def _fail(self, chunk: StoredChunk, what: str) -> NoReturn:
        error = WrongBytesError(chunk, what)
        self._wrong(error)
        raise error
