# SPDX-License-Identifier: Apache-2.0
"""A stored prefix that was found: its chunks, leased, and reading their rows in long runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import aligned_buffer
from hillinfer.secrecy.library import WrongTagError
from hillinfer.secrecy.pages import Pages, PlainPages
from hillinfer.store.database import Chunk
from hillinfer.store.extent import ExtentShape, Sheet, group_sums, salts
from hillinfer.store.keys import CHUNK_TOKENS, Namespace
from hillinfer.store.pool_files import READ_BYTES, PoolFile
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Reads in flight for one prefix.
_THREADS = 4
# Objects of neighbouring layers are read together up to this many bytes of a chunk, and so many
# bytes of all chunks are in flight: more of either is no faster.
_JOINED_BYTES = 4 << 20
_WINDOW_BYTES = 16 << 20
_BUFFERS = 3


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
        for piece, buffer in self._read_ahead(
            pieces, most * self.shape.object_bytes, self._read, self._open_rows
        ):
            for layer in range(piece.first, piece.stop):
                for at, number in enumerate(piece.chunks):
                    yield layer, number * CHUNK_TOKENS, self._rows(piece, buffer, layer, at)

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
        self._check(chunk, layer, first, into)

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
        size = self.shape.layers * self.shape.shadow_bytes
        pieces = [_Piece(0, self.shape.layers, range(number, number + 1)) for number in numbers]
        if not pieces:
            return
        for piece, buffer in self._read_ahead(pieces, size, self._read_shadows, self._open_shadows):
            yield piece.chunks[0], buffer[:size].reshape(self.shape.layers, -1)

    def pages_of(self, chunk: StoredChunk) -> Pages:
        """Return what a chunk's pages go through, its tags read; OSError where that fails."""
        self._read_tags([chunk])
        return chunk.pages

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
        self,
        pieces: Sequence[_Piece],
        buffer_bytes: int,
        into: Callable[[_Piece, NDArray[np.uint8]], None],
        opens: Callable[[_Piece, NDArray[np.uint8]], None],
    ) -> Iterator[tuple[_Piece, NDArray[np.uint8]]]:
        """Yield pieces with what was read of each, valid until the next, while others come."""
        free = deque(aligned_buffer(buffer_bytes) for _ in range(min(_BUFFERS, len(pieces))))
        coming: deque[tuple[_Piece, NDArray[np.uint8], Future[None]]] = deque()
        left = iter(pieces)
        with (
            ThreadPoolExecutor(1, thread_name_prefix="hillinfer-store-read") as ahead,
            # Opens the pages of a piece while the next one is read.
            ThreadPoolExecutor(1, thread_name_prefix="hillinfer-store-open") as opening,
        ):
            try:
                while True:
                    while free and (piece := next(left, None)) is not None:
                        buffer = free.popleft()
                        read = ahead.submit(into, piece, buffer)
                        if self.shape.tag_bytes:
                            read = opening.submit(_follow, read, opens, piece, buffer)
                        coming.append((piece, buffer, read))
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
        self._read_tags([self.chunks[number] for number in piece.chunks])

    def _open_rows(self, piece: _Piece, buffer: NDArray[np.uint8]) -> None:
        """Open the rows of a piece that were read."""
        shape, count = self.shape, piece.stop - piece.first
        for at, number in enumerate(piece.chunks):
            chunk = self.chunks[number]
            for layer in range(count):
                start = (at * count + layer) * shape.object_bytes
                rows = buffer[start : start + chunk.groups * shape.group_bytes]
                self._open_pages(chunk, shape.rows_at(piece.first + layer), rows)

    def _read_tags(self, chunks: Sequence[StoredChunk]) -> None:
        """Read the tags of chunks that have none yet; those of a few chunks come together."""
        size = self.shape.tag_plane_bytes
        wanted = [chunk for chunk in chunks if chunk.pages.wants_tags]
        memory = aligned_buffer(len(wanted) * size)
        for drive in {chunk.record.span.drive for chunk in wanted}:
            own = [at for at, chunk in enumerate(wanted) if chunk.record.span.drive == drive]
            offsets = [wanted[at].record.span.offset + self.shape.tags_at for at in own]
            reads = Reads(np.array(offsets), np.array(own) * size, np.full(len(own), size))
            self._files[drive].read_many(reads, memory, _THREADS)
        for at, chunk in enumerate(wanted):
            chunk.pages.take_tags(memory[at * size : (at + 1) * size])

    def _open_pages(self, chunk: StoredChunk, at: int, data: NDArray[np.uint8]) -> None:
        self._read_tags([chunk])
        try:
            chunk.pages.open(at, data)
        except WrongTagError:
            self._fail(chunk, "pages")

    def _read_shadows(self, piece: _Piece, buffer: NDArray[np.uint8]) -> None:
        """Read and check the shadow plane of one chunk; who takes it copies it meanwhile."""
        chunk = self.chunks[piece.chunks[0]]
        span, layers = chunk.record.span, self.shape.layers
        size = layers * self.shape.shadow_bytes
        reads = Reads.in_pieces(span.offset + self.shape.shadow_at(0), size, READ_BYTES)
        self._files[span.drive].read_many(reads, buffer, _THREADS)
        self._read_tags([chunk])
        if not self.shape.tag_bytes:
            self._check_shadows(chunk, buffer[:size])

    def _open_shadows(self, piece: _Piece, buffer: NDArray[np.uint8]) -> None:
        """Open and check the shadow plane of one chunk that was read."""
        size = self.shape.layers * self.shape.shadow_bytes
        chunk = self.chunks[piece.chunks[0]]
        self._open_pages(chunk, chunk.shape.shadow_at(0), buffer[:size])
        self._check_shadows(chunk, buffer[:size])

    def _check_shadows(self, chunk: StoredChunk, planes: NDArray[np.uint8]) -> None:
        layers = range(self.shape.layers)
        own_salts = np.concatenate([chunk.sheet.shadow_salt(layer) for layer in layers])
        differs = group_sums(planes, own_salts) != chunk.sheet.shadow_sums
        if differs.any():
            self._fail(chunk, f"the key shadows of layer {int(differs.argmax())}")

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

    def _fail(self, chunk: StoredChunk, what: str) -> NoReturn:
        error = WrongBytesError(chunk, what)
        self._wrong(error)
        raise error


def _follow(
    read: Future[None],
    opens: Callable[[_Piece, NDArray[np.uint8]], None],
    piece: _Piece,
    buffer: NDArray[np.uint8],
) -> None:
    """Open a piece once it is read."""
    read.result()
    opens(piece, buffer)


def best_sheet(
    sheets: Sequence[tuple[int, Sheet]],
    namespace: Namespace,
    keys: Sequence[bytes],
    ids: NDArray[np.uint32],
) -> tuple[int, Sheet, int] | None:
    """Return the sheet that covers most of a prompt's groups, its slot, and how many it covers.

    Its keys and token numbers are those of the prompt, or it covers none.
    """
    found = None
    for slot, sheet in sorted(sheets, key=lambda one: one[1].header.generation):
        header = sheet.header
        if header.namespace != namespace.digest:
            continue
        groups = min(header.groups, len(keys))
        same_ids = np.array_equal(sheet.ids[: groups * GROUP_TOKENS], ids[: groups * GROUP_TOKENS])
        if sheet.group_keys[:groups] == list(keys[:groups]) and same_ids:
            found = slot, sheet, groups
    return found
