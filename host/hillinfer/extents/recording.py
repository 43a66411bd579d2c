# SPDX-License-Identifier: Apache-2.0
"""Writes a prompt's rows to a store while they are computed, and publishes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.drive.regions import WriteElsewhere, WrittenElsewhere
from hillinfer.extents.shared_chunks import SharedChunks
from hillinfer.extents.stored_values import LayerValues, ValueSlots, write_values
from hillinfer.shadow.segments import Segment
from hillinfer.shadow.store import shadow_bytes
from hillinfer.shadow.values import SegmentValues
from hillinfer.store.keys import CHUNK_GROUPS, CHUNK_TOKENS, TOKEN_TYPE
from hillinfer.store.pool_files import StoreFailedError
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer.store.writer import PrefixWriter
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- What a store holds of a chunk in one layer beside its rows ---


@dataclass(frozen=True)
class StoredShadow:
    """The shadow of a chunk in one layer.

    Parameters
    ----------
    codes
        uint8 (segment_beats, 64).
    statistics
        By which they were made.
    sums
        uint32 (1024,), a checksum of every row: rows that are read singly are known by it.
    """

    codes: NDArray[np.uint8]
    statistics: ChannelStatistics
    sums: NDArray[np.uint32]


class ShadowSlot:
    """Where codes, statistics and checksums of rows lie in the shadow that a store has of a layer.

    Parameters
    ----------
    spec
        Fixes sizes; its segments are chunks.
    layers
        Of the model.

    Attributes
    ----------
    values
        Where codes of values lie, behind the planes.
    """

    def __init__(self, spec: KernelSpec, layers: int) -> None:
        self.values = ValueSlots(spec, layers)
        if spec.segment_tokens != CHUNK_TOKENS:
            raise ValueError(f"segments of {spec.segment_tokens} tokens are no chunks of a store")
        self._heads = spec.kv_heads, spec.head_dim
        self._codes = spec.segment_bytes
        channels = spec.kv_heads * spec.head_dim
        self._exponents = shadow_bytes(spec)
        self._means = self._exponents + round_up(channels, 4)
        self._sums = self._means + 4 * channels
        self.byte_count = round_up(self._sums + 4 * CHUNK_TOKENS, PAGE_BYTES)

    def pack(self, shadow: StoredShadow, out: NDArray[np.uint8]) -> None:
        """Fill uint8 (byte_count,)."""
        out[:] = 0
        out[: self._codes] = shadow.codes.reshape(-1)[: self._codes]
        for at, part in (
            (self._exponents, shadow.statistics.exponents),
            (self._means, shadow.statistics.means.astype("<i4")),
            (self._sums, shadow.sums.astype("<u4")),
        ):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            out[at : at + len(flat)] = flat

    def unpack(self, data: NDArray[np.uint8]) -> StoredShadow:
        """Return what uint8 (byte_count,) holds; codes and checksums are views."""
        channels = self._heads[0] * self._heads[1]
        exponents = data[self._exponents : self._exponents + channels].view(np.int8)
        means = data[self._means : self._sums].view("<i4").astype(np.int32)
        sums = data[self._sums : self._sums + 4 * CHUNK_TOKENS].view("<u4")
        statistics = ChannelStatistics(
            exponents.reshape(self._heads).copy(), means.reshape(self._heads)
        )
        return StoredShadow(data[: self._codes], statistics, sums)


# --- Rows on their way into a store ---


@dataclass(frozen=True)
class RecordedChunk:
    """A chunk that is whole in every layer and about to be published.

    Parameters
    ----------
    position
        Its number in the prompt.
    groups
        int64, the numbers of its groups.
    segment
        Its shadow in all layers.
    codes
        Of each layer, uint8, and the statistics that they were made by.
    values
        What there is of the values of each layer; None of one that has none.
    """

    position: int
    groups: NDArray[np.int64]
    segment: Segment
    codes: list[tuple[NDArray[np.uint8], ChannelStatistics]]
    values: list[SegmentValues | None]


@dataclass(frozen=True)
class Recorded:
    """A sequence that is recorded, between two passes.

    Parameters
    ----------
    tokens
        How many of its rows every layer has.
    ids
        Their token numbers, int64.
    groups
        int64, the numbers of its groups.
    segments
        Its shadow.
    """

    tokens: int
    ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    segments: Sequence[Segment]


# Codes of each layer of a segment and the statistics that they were made by; None where memory
# and the drive do not have all of it.
CodesOf = Callable[[Segment], list[tuple[NDArray[np.uint8], ChannelStatistics]] | None]
ValueCodesOf = Callable[[int, NDArray[np.int64], SegmentValues], NDArray[np.uint8] | None]


@dataclass(frozen=True)
class EngineSide:
    """What of an engine rows on their way into a store pass through.

    Parameters
    ----------
    chunks
        Which chunks are read.
    queue
        Does something in the writing thread, behind what is queued.
    sums
        Returns the checksums of groups of a layer that are written, uint32 (groups, 64).
    codes
        Returns the shadow of a segment.
    value_codes
        Returns codes of values of a layer's rows, as `KeptCodes.filed` does; None where no file has
        any.
    """

    chunks: SharedChunks
    queue: Callable[[Callable[[], None]], Future[None]]
    sums: Callable[[int, NDArray[np.int64]], NDArray[np.uint32]]
    codes: CodesOf
    value_codes: ValueCodesOf | None


class Recording:
    """Writes the dense rows of one sequence to a store as they leave DRAM, and publishes them.

    Rows are written once. What fails ends the recording: rows that come then go to the cold pool's
    own files.

    Parameters
    ----------
    store, writer
        Where rows go.
    found
        The stored prefix that they come behind, which is closed with this; None where there is
        none.
    ids
        Token numbers of the prompt.
    engine
        What rows pass through.
    slot
        How shadows are stored.
    first_segment
        The first whose statistics will be those of dense reading.
    """

    def __init__(
        self,
        store: Store,
        writer: PrefixWriter,
        found: StoredPrefix | None,
        ids: Sequence[int],
        engine: EngineSide,
        slot: ShadowSlot,
        first_segment: int,
    ) -> None:
        self._store, self._writer, self._found = store, writer, found
        self._ids = np.ascontiguousarray(ids, TOKEN_TYPE)
        self._engine, self._chunks, self._slot = engine, engine.chunks, slot
        self._first_segment = first_segment
        # Groups that the store has, and those of which it was told that they are whole.
        self._first = 0 if found is None else found.tokens // GROUP_TOKENS
        self._told = self._first
        self._numbers: dict[int, int] = {}
        self._ended: Future[None] | None = None
        self._failure: StoreFailedError | None = None
        self._chunks.call_at_close(self, self._end)

    @property
    def is_ended(self) -> bool:
        """Whether no more rows are taken."""
        return self._ended is not None

    @property
    def is_done(self) -> bool:
        """Whether everything is published that ever will be."""
        return self._ended is not None and self._ended.done()

    @property
    def published_tokens(self) -> int:
        """Tokens of the prompt that everybody can find; all of them once `settle` is through."""
        return self._writer.published_tokens

    def elsewhere(self, layer: int, first: int, groups: NDArray[np.int64]) -> WriteElsewhere | None:
        """Return what writes groups to the store that begin with the one of some number.

        Parameters
        ----------
        layer
            Whose.
        first
            The first group's number in the sequence.
        groups
            int64, their numbers in the cold pool.
        """
        if self._ended is not None or first + len(groups) <= self._first:
            return None
        return partial(self._write, layer, first, groups)

    def awaits(self, tokens: int) -> bool:
        """Whether a chunk is whole that `publish` was not told of, with so many tokens."""
        return self._ended is None and self._whole_groups(tokens) > self._told

    def publish(self, made: Recorded) -> None:
        """Publish the chunks that are whole, behind what is queued."""
        if self.awaits(made.tokens):
            self._queue(made, self._whole_groups(made.tokens))

    def finish(self, made: Recorded) -> None:
        """Publish all full groups and end, behind what is queued; harmless when done twice."""
        if self._ended is None:
            groups = min(made.tokens, self._writer.tokens) // GROUP_TOKENS
            if groups > self._told:
                self._queue(made, groups)
            if self._ended is None:
                self._ended = self._engine.queue(partial(self._attempt, self._end))

    def settle(self) -> None:
        """Wait until everything is published, after `finish`.

        Raises
        ------
        StoreFailedError
            Where the store failed and that is not to be a miss; once.
        """
        if self._ended is not None:
            self._ended.result()
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def _whole_groups(self, tokens: int) -> int:
        """Return how many groups are in whole chunks that are to be stored."""
        return min(tokens, self._writer.tokens) // CHUNK_TOKENS * CHUNK_GROUPS

    def _queue(self, made: Recorded, groups: int) -> None:
        tokens = groups * GROUP_TOKENS
        if not np.array_equal(made.ids[:tokens], self._ids[:tokens]):
            # Rows of other tokens than were promised: nothing of them is published.
            self._ended = self._engine.queue(partial(self._attempt, self._end))
            return
        chunks = []
        for position in range(self._told // CHUNK_GROUPS, groups // CHUNK_GROUPS):
            codes = None
            if self._first_segment <= position < len(made.segments):
                codes = self._engine.codes(made.segments[position])
            if codes is not None:
                own = made.groups[position * CHUNK_GROUPS : (position + 1) * CHUNK_GROUPS]
                segment = made.segments[position]
                values = [one.values for one in segment.layers]
                chunks.append(RecordedChunk(position, own, segment, codes, values))
        self._told = groups
        self._engine.queue(partial(self._attempt, partial(self._publish, chunks, tokens)))

    # --- in the writing thread -------------------------------------------------------------

    def _write(
        self, layer: int, first: int, groups: NDArray[np.int64], rows: NDArray[np.uint8]
    ) -> list[WrittenElsewhere]:
        skipped = max(0, self._first - first)
        written = []
        for run in self._writer.write(layer, first + skipped, rows[skipped * GROUP_TOKENS :]):
            begin, end = skipped + run.first, skipped + run.stop
            own = groups[begin:end].tolist()
            if not self._chunks.note_written(self._store, run, run.span, own):
                continue
            self._numbers[(first + begin) // CHUNK_GROUPS] = run.chunk
            file = self._chunks.file(self._store, run.span.drive)
            written.append(WrittenElsewhere(begin, end, file, run.offset))
        return written

    def _attempt(self, step: Callable[[], None]) -> None:
        """Do something whose failure `settle` raises; here nobody would see it."""
        try:
            step()
        except StoreFailedError as error:
            self._failure = self._failure or error

    def _publish(self, chunks: list[RecordedChunk], tokens: int) -> None:
        size = self._slot.byte_count
        memory = aligned_buffer(size)[:size]
        for chunk in chunks:
            for layer, (codes, statistics) in enumerate(chunk.codes):
                sums = self._engine.sums(layer, chunk.groups)
                self._slot.pack(StoredShadow(codes, statistics, sums), memory)
                self._writer.write_shadow(layer, chunk.position, memory)
            values_of = partial(self._values, chunk)
            write_values(self._writer, chunk.position, self._slot.values, values_of)
        self._writer.publish(tokens)
        for chunk in chunks:
            number = self._numbers.get(chunk.position)
            if number is not None:
                self._chunks.note_segment(self._store, number, chunk.segment)

    def _values(self, chunk: RecordedChunk, layer: int) -> LayerValues | None:
        own, codes_of = chunk.values[layer], self._engine.value_codes
        if own is None or codes_of is None:
            return None
        rows = chunk.groups[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)
        codes = codes_of(layer, rows.reshape(-1), own)
        return None if codes is None else LayerValues(codes, own.statistics)

    def _end(self) -> None:
        self._chunks.spare(self)
        try:
            self._writer.finish(partial(self._chunks.is_read, self._store))
        finally:
            if self._found is not None:
                self._found.close()
