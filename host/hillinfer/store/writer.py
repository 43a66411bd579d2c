# SPDX-License-Identifier: Apache-2.0
"""Storing a prefix: rows go to their extents as they are made, and are found once published."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.secrecy.pages import Pages
from hillinfer.secrecy.store_keys import Plain, Sealing
from hillinfer.store.database import Chunk
from hillinfer.store.extent import Header, Sheet, rows_digest
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    TOKEN_TYPE,
    ExtentShape,
    Namespace,
    group_keys,
    group_sums,
    salts,
)
from hillinfer.store.pool_files import PoolFile, Span, place_of
from hillinfer.store.prefix import StoredChunk, StoredPrefix
from hillinfer.store.room import ExtentRoom
from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass
class _Open:
    """A chunk that is being filled.

    Parameters
    ----------
    record
        From the index.
    sheet
        As it was published last, or empty.
    pages
        What its pages go through.
    slot
        Which of both sheets is written next.
    row_sums, shadow_sums
        Checksums, filled in as rows come.
    shadow_layers
        Layers whose shadows are written.
    """

    record: Chunk
    sheet: Sheet
    pages: Pages
    slot: int
    row_sums: NDArray[np.uint32]
    shadow_sums: NDArray[np.uint32]
    shadow_layers: int = 0

    def stored(self) -> StoredChunk:
        """Return it as who finds it sees it."""
        groups = self.sheet.header.groups
        return StoredChunk(self.record, self.sheet, 1 - self.slot, groups, self.pages)


@dataclass(frozen=True)
class WrittenRun:
    """Groups that were written one behind the other.

    Parameters
    ----------
    first, stop
        Which of the groups that were given.
    chunk
        The number of the chunk that they are part of.
    at
        Which of its groups the first is.
    span, offset
        The chunk's extent, and the byte of its file that the first begins at.
    pages
        What the chunk's pages went through.
    """

    first: int
    stop: int
    chunk: int
    at: int
    span: Span
    offset: int
    pages: Pages


def _told_nobody(chunks: Sequence[StoredChunk]) -> None:
    """Keep nothing of chunks that were published."""


class PrefixWriter:
    """Fills chunks with the rows of one prompt, in any order of layers, and publishes them.

    One thread at a time. What fails ends the storing, and never what made the rows: what was
    written stays where it is until `close`.

    Parameters
    ----------
    room
        Hands out extents and publishes.
    files
        The store's, by number of the drive.
    pool
        Identity of the store.
    namespace
        Of the rows.
    root
        Key that the chain begins with.
    ids
        All tokens that are to be stored; what is behind the last full group is not.
    found
        The stored prefix of the same tokens, open, or None; rows go on behind it.
    failed
        Told what went wrong; nothing is written afterwards.
    turn
        Which turn of a conversation this is, 1 the first; 0 where nobody knows.
    published
        Told of chunks that everybody finds now, before anybody may evict them.
    sealing
        How the chunks are kept.
    extra_bytes
        Room that new extents get behind their planes.

    Attributes
    ----------
    cost_per_group
        Seconds that computing a group took; None: those between two publishings count.
    """

    def __init__(
        self,
        room: ExtentRoom,
        files: Sequence[PoolFile],
        pool: bytes,
        namespace: Namespace,
        root: bytes,
        ids: Sequence[int],
        found: StoredPrefix | None,
        failed: Callable[[Exception], None],
        turn: int = 0,
        published: Callable[[Sequence[StoredChunk]], None] = _told_nobody,
        sealing: Sealing | None = None,
        extra_bytes: int = 0,
    ) -> None:
        self._tell_published = published
        self._room = room
        self._files = files
        self._pool = pool
        self._namespace = namespace
        self._sealing = Plain() if sealing is None else sealing
        self._shape = ExtentShape.of(namespace, self._sealing.tag_bytes, extra_bytes)
        self._ids = np.ascontiguousarray(ids, TOKEN_TYPE)
        self._keys = [root, *group_keys(root, self._ids, self._sealing.hash_key)]
        self._found = found
        self._failed = failed
        self._turn = turn
        self._open: dict[int, _Open] = {}
        # Full and published: they stay while this writes, or what follows could not be found.
        self._kept: list[int] = []
        self._published = 0 if found is None else found.tokens // GROUP_TOKENS
        # Numbers of chunks that are full and published, by position.
        self._behind: dict[int, int] = {}
        if found is not None:
            self._behind = {
                position: chunk.record.number
                for position, chunk in enumerate(found.chunks)
                if chunk.groups == CHUNK_GROUPS
            }
        self.cost_per_group: float | None = None
        self._is_ended = False
        self._began = time.perf_counter()

    @property
    def is_ended(self) -> bool:
        """Whether nothing more is stored: it was closed, there is no room, or something failed."""
        return self._is_ended

    @property
    def tokens(self) -> int:
        """Tokens of the full groups that it stores at most, the found prefix included."""
        return (len(self._keys) - 1) * GROUP_TOKENS

    @property
    def published_tokens(self) -> int:
        """Tokens that everybody can find, the found prefix included.

        Fewer than before where a chunk was dropped while it was filled.
        """
        return self._published * GROUP_TOKENS

    def write(self, layer: int, first_group: int, rows: NDArray[np.uint8]) -> list[WrittenRun]:
        """Write rows of full groups that were just made; return what was written where.

        Parameters
        ----------
        layer
            Whose.
        first_group
            Number of the first group in the prompt; the found prefix is before it. What is behind
            the last token that is to be stored is left out.
        rows
            uint8 (groups * 64, row_bytes), contiguous, page-aligned.
        """
        groups = min(len(rows) // GROUP_TOKENS, len(self._keys) - 1 - first_group)
        done = 0
        written: list[WrittenRun] = []
        while done < groups and not self._is_ended:
            position, at = divmod(first_group + done, CHUNK_GROUPS)
            count = min(groups - done, CHUNK_GROUPS - at)
            part = rows[done * GROUP_TOKENS : (done + count) * GROUP_TOKENS]
            self._attempt(self._write_part, layer, position, at, part)
            own = self._open.get(position)
            if own is not None and not self._is_ended:
                record = own.record
                offset = record.span.offset + self._shape.rows_at(layer, at)
                written.append(
                    WrittenRun(
                        done, done + count, record.number, at, record.span, offset, own.pages
                    )
                )
            done += count
        return written

    def write_shadow(self, layer: int, position: int, shadow: NDArray[np.uint8]) -> None:
        """Write the shadow of a chunk all groups of which are written or will be.

        Parameters
        ----------
        layer, position
            Whose, and the number of the chunk in the prompt.
        shadow
            uint8 (shadow_bytes,), page-aligned.
        """
        if not self._is_ended:
            self._attempt(self._write_shadow, layer, position, shadow)

    def rows_digest(self, position: int) -> bytes | None:
        """Return `rows_digest` of a chunk that is full, all rows of which are written.

        None where its extent has no room behind its planes, or nothing more is stored.
        """
        own = None if self._is_ended else self._open.get(position)
        if own is None or not own.sheet.header.extra_bytes:
            return None
        return rows_digest(self._keys[(position + 1) * CHUNK_GROUPS], own.row_sums)

    def write_extra(self, position: int, at: int, data: NDArray[np.uint8]) -> None:
        """Write whole pages to the room behind a chunk's planes, where `rows_digest` tells of some.

        They begin at byte `at` of that room, and lie in memory at a page.
        """
        own = self._open.get(position)
        if own is not None and not self._is_ended:
            offset = own.record.span.offset + self._shape.extra_at + at
            self._attempt(self._files[own.record.span.drive].write, data, offset)

    def publish(self, tokens: int) -> None:
        """Let everybody find all full groups below a position; all layers of them are written.

        Parameters
        ----------
        tokens
            The position, at most as many as were given.
        """
        groups = min(tokens // GROUP_TOKENS, len(self._keys) - 1)
        if groups > self._published and not self._is_ended:
            self._attempt(self._publish, groups)

    def finish(self, is_read: Callable[[int], bool]) -> None:
        """Write no more, and let others go on from what was published.

        Parameters
        ----------
        is_read
            Says of a chunk that was not published, by its number, whether somebody reads its rows;
            who does ends it with `ExtentRoom.end_writing`. The others are thrown away.
        """
        self._is_ended = True
        ended = [
            position
            for position, own in self._open.items()
            if own.sheet.header.groups or not is_read(own.record.number)
        ]
        self._end(ended)
        self._open = {}

    def close(self) -> None:
        """End: what was not published is thrown away; harmless when done twice."""
        self._is_ended = True
        self._end(list(self._open))

    # --- inside ----------------------------------------------------------------------------

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except Exception as error:
            self._is_ended = True
            self._failed(error)

    def _end(self, positions: Sequence[int]) -> None:
        numbers = [self._open.pop(position).record.number for position in positions]
        kept, self._kept = self._kept, []
        if numbers or kept:
            try:
                self._room.end_writing(numbers)
                self._room.release(kept)
            except Exception as error:
                self._failed(error)

    def _chunk(self, position: int) -> _Open | None:
        """Return the chunk at a position that is being filled, begun now where it was not."""
        if position in self._open:
            return self._open[position]
        first = position * CHUNK_GROUPS
        target = self._keys[min(first + CHUNK_GROUPS, len(self._keys) - 1)]
        own = self._extended(position, target) or self._begun(position, target)
        if own is None:
            # No room: what follows could not be found without it.
            self._is_ended = True
            return None
        self._open[position] = own
        return own

    def _begun(self, position: int, target: bytes) -> _Open | None:
        first = position * CHUNK_GROUPS
        before = self._keys[first]
        above = self._open.get(position - 1)
        parent = self._behind.get(position - 1) if above is None else above.record.number
        place = position, parent, before, target, self._shape.extra_bytes
        record = self._room.begin(self._namespace, *place)
        if record is None:
            return None
        sizes = self._shape.layers, self._shape.row_bytes, self._shape.shadow_bytes
        header = Header(
            self._pool,
            self._namespace.digest,
            before,
            before,
            record.generation,
            position,
            0,
            *sizes,
            turn=self._turn,
            tag_bytes=self._shape.tag_bytes,
            extra_bytes=self._shape.extra_bytes,
        )
        sheet = Sheet.empty(header, self._sealing)
        pages = self._sealing.begin(place_of(record.span, self._pool), self._shape.page_layout)
        own = _Open(record, sheet, pages, 0, sheet.row_sums.copy(), sheet.shadow_sums.copy())
        # First: it is given back with the others whatever fails.
        self._open[position] = own
        self._files[record.span.drive].ensure(record.span)
        if self._published > first:
            self._copy(own, self._published - first)
        return own

    def _extended(self, position: int, target: bytes) -> _Open | None:
        """Return the last chunk of the found prefix, where it may be filled in its place."""
        found = self._found
        if found is None or position != len(found.chunks) - 1:
            return None
        last = found.chunks[-1]
        if last.groups < last.sheet.header.groups or last.groups == CHUNK_GROUPS:
            return None
        if not self._room.extend(last.record.number, last.groups, target):
            return None
        sheet = last.sheet
        sums = sheet.row_sums.copy(), sheet.shadow_sums.copy()
        return _Open(last.record, sheet, found.pages_of(last).go_on(), 1 - last.slot, *sums)

    def _copy(self, own: _Open, groups: int) -> None:
        """Copy the first groups of the found prefix' last chunk: others go on from it elsewhere."""
        assert self._found is not None
        last = self._found.chunks[-1]
        rows = aligned_buffer(groups * self._shape.group_bytes)
        rows = rows[: groups * self._shape.group_bytes].reshape(-1, self._shape.row_bytes)
        for layer in range(self._shape.layers):
            self._found.read_groups(last, layer, 0, rows)
            self._put(own, layer, 0, rows)

    def _write_part(self, layer: int, position: int, at: int, rows: NDArray[np.uint8]) -> None:
        own = self._chunk(position)
        if own is not None:
            self._put(own, layer, at, rows)

    def _put(self, own: _Open, layer: int, at: int, rows: NDArray[np.uint8]) -> None:
        count = len(rows) // GROUP_TOKENS
        first = own.record.position * CHUNK_GROUPS + at
        keys = self._keys[first + 1 : first + 1 + count]
        own.row_sums[layer, at : at + count] = group_sums(rows, salts(keys, layer))
        self._write_pages(own, self._shape.rows_at(layer, at), rows)

    def _write_shadow(self, layer: int, position: int, shadow: NDArray[np.uint8]) -> None:
        stop = (position + 1) * CHUNK_GROUPS
        own = None if stop >= len(self._keys) else self._chunk(position)
        if own is None:
            return
        salt = salts([self._keys[stop]], -1 - layer)
        own.shadow_sums[layer] = group_sums(shadow, salt)[0]
        own.shadow_layers += 1
        self._write_pages(own, self._shape.shadow_at(layer), shadow)

    def _write_pages(self, own: _Open, at: int, data: NDArray[np.uint8]) -> None:
        span = own.record.span
        self._files[span.drive].write(own.pages.seal(at, data), span.offset + at)

    def _publish(self, groups: int) -> None:
        """Commit: bytes to the drives, then sheets, then the index."""
        changed = [
            own
            for position, own in sorted(self._open.items())
            if position * CHUNK_GROUPS < groups
            and own.sheet.header.groups < min(groups - position * CHUNK_GROUPS, CHUNK_GROUPS)
        ]
        for own in changed:
            self._write_aligned(own.record.span, self._shape.tags_at, own.pages.tags)
        for drive in sorted({own.record.span.drive for own in changed}):
            self._files[drive].settle()
        cost = self._cost(groups)
        sheets = [self._sheet(own, groups, cost) for own in changed]
        for own, sheet in zip(changed, sheets, strict=True):
            span = own.record.span
            page, body = sheet.sealed(place_of(span, self._pool), own.slot)
            self._write_aligned(span, self._shape.body_at(own.slot), body)
            self._write_aligned(span, own.slot * PAGE_BYTES, page)
        done = self._room.publish(
            [
                (own.record.number, sheet.header, sheet.group_keys)
                for own, sheet in zip(changed, sheets, strict=True)
            ]
        )
        self._published = groups
        if done < len(changed):
            # Somebody dropped it meanwhile; what follows could not be found without it.
            self._is_ended = True
            self._published = changed[done].record.position * CHUNK_GROUPS
            del changed[done:]
        fresh = 0
        for own, sheet in zip(changed, sheets, strict=False):
            fresh += sheet.header.groups - own.sheet.header.groups
            own.sheet, own.slot = sheet, 1 - own.slot
        self._room.meter.add(
            stored_tokens=fresh * GROUP_TOKENS,
            stored_bytes=fresh * self._shape.layers * self._shape.group_bytes,
        )
        self._tell_published([own.stored() for own in changed])
        full = [own for own in changed if own.sheet.header.is_full]
        # Before they are let go: in between they would be leaves that others may evict.
        self._room.keep([own.record.number for own in full])
        self._kept += [own.record.number for own in full]
        self._room.end_writing([own.record.number for own in full])
        for own in full:
            self._behind[own.record.position] = own.record.number
            del self._open[own.record.position]

    def _write_aligned(self, span: Span, at: int, data: bytes) -> None:
        """Write bytes of anywhere, filled up to whole pages."""
        if data:
            memory = aligned_buffer(len(data))
            memory[: len(data)] = np.frombuffer(data, np.uint8)
            self._files[span.drive].write(memory, span.offset + at)

    def _cost(self, groups: int) -> float:
        """Return the seconds that computing one group took: told, or since the last were stored."""
        seconds = time.perf_counter() - self._began
        self._began = time.perf_counter()
        if self.cost_per_group is not None:
            return self.cost_per_group
        return seconds / max(1, groups - self._published)

    def _sheet(self, own: _Open, groups: int, cost: float) -> Sheet:
        first = own.record.position * CHUNK_GROUPS
        count = min(groups - first, CHUNK_GROUPS)
        ids = np.zeros(CHUNK_TOKENS, TOKEN_TYPE)
        start = first * GROUP_TOKENS
        ids[: count * GROUP_TOKENS] = self._ids[start : start + count * GROUP_TOKENS]
        old = own.sheet.header
        header = replace(
            old,
            key=self._keys[first + count],
            groups=count,
            generation=self._room.generation(),
            cost=old.cost + cost * (count - old.groups),
            has_shadow=count == CHUNK_GROUPS and own.shadow_layers == self._shape.layers,
        )
        sums = own.row_sums.copy(), own.shadow_sums.copy()
        return Sheet(header, ids, *sums, self._sealing, own.pages.epochs)
