# SPDX-License-Identifier: Apache-2.0
"""A stored prefix that was found: its chunks, leased, and reading their rows in long runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import aligned_buffer
from hillinfer.store.database import Chunk
from hillinfer.store.extent import (
    Expected,
    ExtentShape,
    Sheet,
    SheetCache,
    group_sums,
    read_sheets,
    salts,
)
from hillinfer.store.keys import CHUNK_TOKENS
from hillinfer.store.pool_files import READ_BYTES, PoolFile
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Reads in flight for one prefix.
_THREADS = 4
# Objects of neighbouring layers are read together up to this many bytes of a chunk, and so many
# bytes of all chunks are in flight: more of either is no faster.
_JOINED_BYTES = 4 << 20
_WINDOW_BYTES = 16 << 20
_BUFFERS = 3


# Sheets that are read at once, and what those may take that are kept in memory.
_SHEETS_AT_ONCE = 16
_SHEET_BYTES = 32 << 20


class SheetReader:
    """Reads the sheets of chunks from their drives, each once as far as memory goes.

    Any thread may use it.

    Parameters
    ----------
    files
        The store's, by number of the drive.
    pool
        Identity of the store.
    shape
        Returns the shape of a namespace's extents, by its number.
    """

    def __init__(
        self, files: Sequence[PoolFile], pool: bytes, shape: Callable[[int], ExtentShape]
    ) -> None:
        self._files = files
        self._pool = pool
        self._shape = shape
        self._known = SheetCache(_SHEET_BYTES)

    def of(
        self, chunks: Sequence[Chunk], expected: Sequence[Expected | None]
    ) -> list[list[tuple[int, Sheet]]]:
        """Return the whole sheets of each chunk, with their slots, in two.

        Parameters
        ----------
        chunks
            Of one namespace, leased.
        expected
            What each should be, None where nobody knows.

        Raises
        ------
        OSError
            Where a drive cannot be read.
        """
        found: list[list[tuple[int, Sheet]]] = []
        for chunk in chunks:
            known = self._known.get(chunk.span.drive, chunk.span.unit, chunk.generation)
            found.append([] if known is None else [known])
        missing = [at for at, sheets in enumerate(found) if not sheets]
        if not missing:
            return found
        shape = self._shape(chunks[0].namespace)
        size = shape.sheets_bytes
        memory = aligned_buffer(len(missing) * size)
        for drive, file in enumerate(self._files):
            rows = [row for row, at in enumerate(missing) if chunks[at].span.drive == drive]
            if rows:
                places = np.array(rows, np.int64) * size
                offsets = np.array([chunks[missing[row]].span.offset for row in rows], np.int64)
                reads = Reads(offsets, places, np.full(len(rows), size))
                file.read_many(reads, memory, _SHEETS_AT_ONCE)
        for row, at in enumerate(missing):
            data = memory[row * size : (row + 1) * size].tobytes()
            found[at] = read_sheets(data, shape, self._pool, expected[at])
            span = chunks[at].span
            for slot, sheet in found[at]:
                self._known.keep(span.drive, span.unit, slot, sheet)
        return found


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
    """

    record: Chunk
    sheet: Sheet
    slot: int
    groups: int

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


@dataclass(frozen=True)
class _Piece:
    """Neighbouring layers of some chunks, read at once into one buffer.

    Parameters
    ----------
    first, stop
        Layers.
    chunks
        Numbers of the chunks in the prefix.
    """

    first: int
    stop: int
    chunks: range


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
        Told of a chunk whose bytes are wrong.

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
        wrong: Callable[[WrongBytesError], None],
    ) -> None:
        self.chunks = list(chunks)
        self.tokens = sum(chunk.groups for chunk in chunks) * GROUP_TOKENS
        self._files = files
        self._release = release
        self._wrong = wrong
        self._is_open = True

    @property
    def shape(self) -> ExtentShape:
        """Shape of its extents."""
        return self.chunks[0].shape

    @property
    def byte_count(self) -> int:
        """Bytes of its rows in all layers."""
        return self.tokens * self.shape.layers * self.shape.row_bytes

    def stream(self) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """Yield all rows, layer by layer, as the drive gives them in long reads.

        Checked: what is not as it was written is not yielded.

        Yields
        ------
        A layer, the position of the first token, and rows, uint8 (tokens, row_bytes), valid until
        the next.

        Raises
        ------
        OSError, WrongBytesError
            Where a drive fails or gives other bytes.
        """
        pieces = list(self._pieces())
        most = max((piece.stop - piece.first) * len(piece.chunks) for piece in pieces)
        for piece, buffer in self._read_ahead(pieces, most * self.shape.object_bytes):
            for layer in range(piece.first, piece.stop):
                for at, number in enumerate(piece.chunks):
                    yield layer, number * CHUNK_TOKENS, self._rows(piece, buffer, layer, at)

    def chunkwise(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the rows of each chunk in all layers, checked, in one long read.

        Yields
        ------
        The position of its first token, and rows, uint8 (layers, tokens, row_bytes), valid until
        the next.

        Raises
        ------
        OSError, WrongBytesError
            As from `stream`.
        """
        layers = self.shape.layers
        pieces = [
            _Piece(0, layers, range(number, number + 1)) for number in range(len(self.chunks))
        ]
        for number, (piece, buffer) in enumerate(
            self._read_ahead(pieces, layers * self.shape.object_bytes)
        ):
            for layer in range(layers):
                self._rows(piece, buffer, layer, 0)
            size = layers * self.shape.object_bytes
            rows = buffer[:size].reshape(layers, CHUNK_TOKENS, -1)
            yield number * CHUNK_TOKENS, rows[:, : self.chunks[number].groups * GROUP_TOKENS]

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
        self._files[span.drive].read(into, span.offset + chunk.shape.rows_at(layer, first))
        self._check(chunk, layer, first, into)

    def read_shadow(self, chunk: StoredChunk, layer: int, into: NDArray[np.uint8]) -> None:
        """Read and check the shadow of a chunk in a layer, uint8 (shadow_bytes,), page-aligned.

        Raises
        ------
        OSError, WrongBytesError
            As from `stream`.
        """
        span, sheet = chunk.record.span, chunk.sheet
        self._files[span.drive].read(into, span.offset + chunk.shape.shadow_at(layer))
        if group_sums(into, sheet.shadow_salt(layer))[0] != sheet.shadow_sums[layer]:
            self._fail(chunk, f"the key shadows of layer {layer}")

    def close(self) -> None:
        """Let the chunks be evicted; harmless when done twice."""
        if self._is_open:
            self._is_open = False
            self._release([chunk.record.number for chunk in self.chunks])

    def __enter__(self) -> StoredPrefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------

    def _pieces(self) -> Iterator[_Piece]:
        """Cut the prefix into reads of neighbouring layers and chunks."""
        size, layers = self.shape.object_bytes, self.shape.layers
        joined = max(1, _JOINED_BYTES // size)
        together = max(1, _WINDOW_BYTES // (joined * size))
        for layer in range(0, layers, joined):
            numbers = iter(range(len(self.chunks)))
            while part := list(islice(numbers, together)):
                stop = min(layer + joined, layers)
                yield _Piece(layer, stop, range(part[0], part[-1] + 1))

    def _read_ahead(
        self, pieces: Sequence[_Piece], buffer_bytes: int
    ) -> Iterator[tuple[_Piece, NDArray[np.uint8]]]:
        """Yield pieces with what was read of each, valid until the next, while others come."""
        free = deque(aligned_buffer(buffer_bytes) for _ in range(min(_BUFFERS, len(pieces))))
        coming: deque[tuple[_Piece, NDArray[np.uint8], Future[None]]] = deque()
        left = iter(pieces)
        with ThreadPoolExecutor(1, thread_name_prefix="hillinfer-store-read") as ahead:
            try:
                while True:
                    while free and (piece := next(left, None)) is not None:
                        buffer = free.popleft()
                        coming.append((piece, buffer, ahead.submit(self._read, piece, buffer)))
                    if not coming:
                        return
                    piece, buffer, read = coming.popleft()
                    read.result()
                    yield piece, buffer
                    free.append(buffer)
            finally:
                for _, _, read in coming:
                    read.cancel()

    def _read(self, piece: _Piece, buffer: NDArray[np.uint8]) -> None:
        """Read a piece in long reads, all drives' one after the other."""
        shape, count = self.shape, piece.stop - piece.first
        chunk_bytes = count * shape.object_bytes
        by_drive: dict[int, list[tuple[int, int, int]]] = {}
        for at, number in enumerate(piece.chunks):
            chunk = self.chunks[number]
            span = chunk.record.span
            offset = span.offset + shape.rows_at(piece.first)
            # The last layer's rows end with the last group that is wanted.
            size = chunk_bytes - shape.object_bytes + chunk.groups * shape.group_bytes
            parts = Reads.in_pieces(offset, size, READ_BYTES)
            by_drive.setdefault(span.drive, []).extend(
                zip(
                    parts.file_offsets.tolist(),
                    (parts.buffer_offsets + at * chunk_bytes).tolist(),
                    parts.byte_counts.tolist(),
                    strict=True,
                )
            )
        for drive, places in by_drive.items():
            columns = np.array(places, np.int64).T
            self._files[drive].read_many(Reads(*columns), buffer, _THREADS)

    def _rows(
        self, piece: _Piece, buffer: NDArray[np.uint8], layer: int, at: int
    ) -> NDArray[np.uint8]:
        """Return the checked rows of a layer of one of a piece's chunks."""
        shape, chunk = self.shape, self.chunks[piece.chunks[at]]
        start = at * (piece.stop - piece.first) + layer - piece.first
        start *= shape.object_bytes
        rows = buffer[start : start + chunk.groups * shape.group_bytes]
        rows = rows.reshape(-1, shape.row_bytes)
        self._check(chunk, layer, 0, rows)
        return rows

    def _check(self, chunk: StoredChunk, layer: int, first: int, rows: NDArray[np.uint8]) -> None:
        stop = first + len(rows) // GROUP_TOKENS
        own = salts(chunk.sheet.group_keys[first:stop], layer)
        if (group_sums(rows, own) != chunk.sheet.row_sums[layer, first:stop]).any():
            self._fail(chunk, f"rows of layer {layer}")

    def _fail(self, chunk: StoredChunk, what: str) -> None:
        error = WrongBytesError(chunk, what)
        self._wrong(error)
        raise error
