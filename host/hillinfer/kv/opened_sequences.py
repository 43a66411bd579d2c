# SPDX-License-Identifier: Apache-2.0
"""Opens sequences from rows that exist: those of a saved session, or of a stored prefix."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.checksums import sums_of
from hillinfer.drive.landing import RowBuffers, WantedRows
from hillinfer.drive.regions import OWN_FILE, GroupTable
from hillinfer.drive.shared_files import OpenFiles, RowBase, ShadowBase
from hillinfer.errors import BudgetError, HillInferWarning
from hillinfer.extents.recording import ShadowSlot, StoredShadow
from hillinfer.extents.shared_chunks import SharedChunks
from hillinfer.extents.stored_values import DamagedValuesError, stored_values
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.rows import SequenceManager
from hillinfer.kv.saved_sequences import bring_codes, fill_sequence, recall_codes
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.model_shape import ModelShape
from hillinfer.sessions.opening import SavedSession, SavedShadow
from hillinfer.shadow.segments import Segment
from hillinfer.store.keys import CHUNK_GROUPS
from hillinfer.store.prefix import StoredChunk, StoredPrefix, WrongBytesError
from hillinfer.store.store import Store
from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass(frozen=True)
class StoredRows:
    """A stored prefix that is to be read where it lies.

    Parameters
    ----------
    store, prefix
        The prefix, leased while it is opened.
    tokens
        How many of them to take, whole groups.
    slot
        How the store has shadows.
    has_codes
        Whether those shadows are coded as the engine's are.
    """

    store: Store
    prefix: StoredPrefix
    ids: SequenceOf[int]
    tokens: int
    slot: ShadowSlot
    has_codes: bool


@dataclass(frozen=True)
class OpenedRows:
    """What came of opening a stored prefix.

    Parameters
    ----------
    failure
        Why there are no more; None where all are there.
    """

    tokens: int
    read_bytes: int
    failure: Exception | None


@dataclass(frozen=True)
class _Part:
    """A chunk of a prefix, and what of it is to be read.

    Parameters
    ----------
    number, chunk, count
        Of the prefix; how many of its groups are wanted.
    segment
        Its shadow where another sequence has it.
    is_open
        Whether other sequences have all these groups.
    reads_shadow
        Whether its shadow plane is to be read.
    """

    number: int
    chunk: StoredChunk
    count: int
    segment: Segment | None
    is_open: bool
    reads_shadow: bool


class _NoRoomForTagsError(Exception):
    """The budget has no room for the tags of a sealed chunk: the prefix ends before it."""


class SequenceOpener:
    """Gives sequences the first tokens of a saved session, or of a stored prompt.

    Parameters
    ----------
    open_files
        Has descriptors for the files of sessions.
    """

    def __init__(
        self,
        shape: ModelShape,
        store: ColdStore,
        groups: GroupTable,
        chunks: SharedChunks,
        pools: HotPools,
        manager: PoolManager,
        shadow: SequenceShadows,
        rows: SequenceManager,
        buffers: RowBuffers,
        open_files: OpenFiles,
    ) -> None:
        self._shape = shape
        self._store, self._groups, self._chunks = store, groups, chunks
        self._pools, self._manager, self._shadow, self._rows = pools, manager, shadow, rows
        self._buffers, self._open_files = buffers, open_files

    # --- saved sessions --------------------------------------------------------------------

    def resume(self, saved: SavedSession, tokens: int) -> Sequence:
        """Return a sequence of the first tokens of a saved session, whose rows become a base.

        Parameters
        ----------
        saved
            Verified.
        tokens
            How many to take: all of them, with everything as it was, or fewer, with whole segments
            as they were and nothing else but rows.
        """
        sequence = self._rows.open()
        try:
            base = saved.take_base(-(-tokens // GROUP_TOKENS), self._open_files)
            try:
                first = self._open_base(base.rows)
                try:
                    self._fill(sequence, saved, tokens, first, base.shadow)
                finally:
                    self._groups.let_go(first)
                    self._rows.close_bases()
            except BaseException:
                base.close()
                raise
        except BaseException:
            # Also of what Ctrl-C kept anybody from knowing of: nobody gets closed files to read.
            self._groups.let_all_go()
            self._rows.release(sequence)
            raise
        return sequence

    def _open_base(self, base: RowBase) -> int:
        """Return the first group of a base, which is held; that of the same files if one is open.

        Rows that two sequences read from the same files are the same rows: hot once, for both.
        """
        first = self._store.others.base_like(base)
        if first is not None:
            base.close()
            self._groups.hold(first)
            return first
        first = self._groups.open_region(base.count)
        try:
            self._pools.cover(self._groups.groups * GROUP_TOKENS)
            self._store.cover(self._groups.groups)
            self._store.add_base(first, base)
        except BaseException:
            self._groups.let_go(first)
            self._rows.close_bases()
            raise
        return first

    def _fill(
        self, sequence: Sequence, saved: SavedSession, tokens: int, first: int, shadow: ShadowBase
    ) -> None:
        """Give an empty sequence the first tokens of a session whose groups begin with `first`."""
        groups, whole = tokens // GROUP_TOKENS, tokens == saved.tokens
        sequence.token_ids.extend(saved.token_ids()[:tokens])
        self._share(sequence, range(first, first + groups))
        open_rows = np.arange(groups * GROUP_TOKENS, tokens)
        # Rows of the session's own open group lie in no file of rows.
        is_cut = len(open_rows) > 0 and groups < saved.tokens // GROUP_TOKENS
        for layer, tail in enumerate(sequence.tails):
            if is_cut:
                places = open_rows % GROUP_TOKENS
                rows = first * GROUP_TOKENS + open_rows
                self._store.read_rows(WantedRows(layer, rows, tail, places))
            self._pools.cover_hits(sequence.hits, layer, tokens)
        segments = (
            saved.manifest.extent.segments if whole else tokens // self._shadow.spec.segment_tokens
        )
        kept = SavedShadow(saved)
        self._shadow.adopt(sequence, kept, segments, tokens, shadow)
        fill_sequence(saved, sequence, tokens, self._manager.observed_queries)
        for layer in range(self._shape.layers):
            sequence.set_length(layer, tokens, groups * GROUP_TOKENS)
        if self._shadow.values is not None and self._shadow.codes is not None:
            recall_codes(saved, sequence, self._shadow.values)
            bring_codes(kept, sequence, self._shadow.codes)

    # --- stored prompts --------------------------------------------------------------------

    def open_stored(self, sequence: Sequence, stored: StoredRows) -> OpenedRows:
        """Give an empty sequence the first tokens of a stored prompt, whose rows stay there.

        Key shadows come, and rows of chunks that have none: their checksums are taken. What other
        sequences opened is shared with them. Where a chunk is wrong or cannot be read the tokens
        end before it.

        Raises
        ------
        BudgetError
            Where the budget does not hold it.
        StoreError
            Where the store's index fails.
        """
        groups = stored.tokens // GROUP_TOKENS
        chunks = stored.prefix.chunks[: -(-groups // CHUNK_GROUPS)]
        parts = [
            self._part(stored, number, chunk, min(CHUNK_GROUPS, groups - number * CHUNK_GROUPS))
            for number, chunk in enumerate(chunks)
        ]
        planes = stored.prefix.shadows([part.number for part in parts if part.reads_shadow])
        made = sum(part.reads_shadow and part.count == CHUNK_GROUPS for part in parts)
        read_bytes = 0
        failure: Exception | None = None
        with (
            closing(planes),
            self._chunks.leasing(stored.store, chunks),
            self._shadow.coming.expected(made if stored.has_codes else 0),
        ):
            try:
                for part in parts:
                    read_bytes += self._take(sequence, stored, part, planes)
            except (OSError, WrongBytesError, _NoRoomForTagsError) as error:
                # What came before it is whole.
                failure = error
        tokens = len(sequence.groups) * GROUP_TOKENS
        sequence.token_ids.frombytes(np.asarray(stored.ids[:tokens], np.int32).tobytes())
        for layer in range(self._shape.layers):
            self._pools.cover_hits(sequence.hits, layer, tokens)
        for layer in range(self._shape.layers):
            sequence.set_length(layer, tokens, tokens)
        return OpenedRows(tokens, read_bytes, failure)

    # --- stored prompts that cannot be read any more ---------------------------------------

    def continues_session(self, sequence: Sequence) -> bool:
        """Whether rows of a sequence lie in a session's files, which are never written."""
        groups = np.array(sequence.groups, np.int64)
        return bool(len(groups)) and self._store.others.in_base(groups)

    def stored_tokens(self, sequence: Sequence) -> int:
        """Return behind which token of a sequence no row lies in a store.

        Its rows are written to no store any more from here on.

        Raises
        ------
        StoreFailedError
            Where storing failed and that is not to be a miss.
        ColdPoolError
            Where the own files did not take what was computed again.
        """
        self._rows.settle_recording(sequence)
        groups = np.array(sequence.groups, np.int64)
        if not len(groups):
            return 0
        # What is on its way to the own files counts as stored until it is there.
        for layer in range(self._shape.layers):
            self._store.settle(layer, groups)
        own = [
            self._store.others.placement.of(layer, groups) for layer in range(self._shape.layers)
        ]
        (stored,) = (np.array(own) != OWN_FILE).any(axis=0).nonzero()
        return (int(stored[-1]) + 1) * GROUP_TOKENS if len(stored) else 0

    def open_again(self, sequence: Sequence, tokens: int) -> Sequence:
        """Return an empty sequence whose rows take the places of another's first ones.

        They go to the cold pool's own files. Whoever shares these groups has them there, too.

        Parameters
        ----------
        sequence
            Whose groups it has from the start, and whose shadow, as far as that is whole.
        tokens
            That are going to come to it, all of which the other one has.

        Raises
        ------
        BudgetError
            Where the budget does not hold one sequence more.
        """
        again, size = self._rows.open(), self._shadow.spec.segment_tokens
        try:
            self._share(again, sequence.groups[: tokens // GROUP_TOKENS])
            for segment in sequence.segments[: tokens // size]:
                if any(own.coded_tokens < size for own in segment.layers):
                    break
                self._shadow.share_segment(again, segment)
        except BaseException:
            self._rows.release(again)
            raise
        return again

    # --- inside ----------------------------------------------------------------------------

    def _share(self, sequence: Sequence, groups: SequenceOf[int]) -> None:
        """Append groups of others to a sequence, owned once more each."""
        for group in groups:
            count = sequence.group_count
            self._groups.share(group)
            try:
                sequence.append_groups([group])
            except BaseException:
                # Ctrl-C: what is not the sequence's is not given back with it.
                if sequence.group_count == count:
                    self._groups.give(group)
                raise

    def _part(self, stored: StoredRows, number: int, chunk: StoredChunk, count: int) -> _Part:
        segment = self._chunks.segment(stored.store, chunk) if count == CHUNK_GROUPS else None
        is_open = self._chunks.has_groups(stored.store, chunk, count)
        has_shadow = chunk.sheet.header.has_shadow
        # Of a part of a chunk checksums alone are wanted.
        wants = segment is None and (count == CHUNK_GROUPS or not is_open)
        return _Part(number, chunk, count, segment, is_open, has_shadow and wants)

    def _take(
        self,
        sequence: Sequence,
        stored: StoredRows,
        part: _Part,
        planes: Iterator[tuple[int, NDArray[np.uint8]]],
    ) -> int:
        """Append one chunk's groups to a sequence; return the bytes that were read for it."""
        shape, layers = part.chunk.shape, range(self._shape.layers)
        shadows: list[StoredShadow] = []
        sums: list[NDArray[np.uint32]] = []
        read_bytes = 0
        # Whatever the drive may refuse comes before anything of the sequence changes.
        if part.chunk.pages.wants_tags:
            stored.prefix.pages_of(part.chunk)
        if part.reads_shadow:
            _, plane = next(planes)
            shadows = [stored.slot.unpack(own) for own in plane]
            sums = [shadow.sums[: part.count * GROUP_TOKENS] for shadow in shadows]
            read_bytes = len(shadows) * shape.shadow_bytes
        elif part.segment is None and not part.is_open:
            sums = [self._row_sums(stored, part, layer) for layer in layers]
            read_bytes = len(layers) * part.count * shape.group_bytes
        try:
            numbers = self._chunks.open(stored.store, part.chunk, part.count)
        except BudgetError as error:
            raise _NoRoomForTagsError(str(error)) from error
        sequence.append_groups(numbers)
        self._pools.cover(self._groups.groups * GROUP_TOKENS)
        self._store.cover(self._groups.groups)
        own = np.array(numbers, np.int64)
        for layer, of_rows in enumerate(sums):
            self._store.adopt_sums(layer, own, of_rows)
        # Segments come in order: behind one that is to be coded all are.
        if part.count == CHUNK_GROUPS and len(sequence.segments) == part.number:
            if part.segment is not None:
                self._shadow.share_segment(sequence, part.segment)
            elif shadows and stored.has_codes:
                made = [(one.statistics, one.codes) for one in shadows]
                segment = self._shadow.adopt_stored(sequence, made, stored.tokens)
                read_bytes += self._bring_values(stored, part, segment, own)
                self._chunks.note_segment(stored.store, part.chunk.record.number, segment)
        return read_bytes

    def _bring_values(
        self, stored: StoredRows, part: _Part, segment: Segment, groups: NDArray[np.int64]
    ) -> int:
        """Give a segment codes of its values where the store has them; return the bytes read.

        They come through the buffers that all reads take turns with, as `_row_sums` has it. Where
        they are damaged the user is warned, and they are made of rows later.
        """
        codes, slots, read_bytes = self._shadow.codes, stored.slot.values, 0
        if codes is None:
            return 0
        rows = (groups[:, None] * GROUP_TOKENS + np.arange(GROUP_TOKENS)).reshape(-1)
        codes.make_room(int(rows.max()) + 1)
        self._buffers.settle()
        memory = self._buffers.take_both().reshape(-1)
        try:
            for layer, made in enumerate(stored_values(stored.store, part.chunk, slots, memory)):
                read_bytes += slots.slot_bytes
                own = codes.numbered(layer, rows, made.statistics)
                segment.layers[layer].values = own
                codes.lack(own)
                codes.bring(layer, rows, own, partial(np.asarray, made.codes))
        except DamagedValuesError as error:
            warnings.warn(
                f"codes of values in the store {stored.store.places.directory} are left out: "
                f"{error}; they are made of its rows: same tokens, slower",
                HillInferWarning,
                stacklevel=2,
            )
        return read_bytes

    def _row_sums(self, stored: StoredRows, part: _Part, layer: int) -> NDArray[np.uint32]:
        """Return the checksums of a chunk's rows in a layer, uint32 (64 · groups,).

        The rows come through the buffers that all reads take turns with: memory of their own nobody
        would count.
        """
        self._buffers.settle()
        memory = self._buffers.take_both()
        at_once, sums = len(memory) // GROUP_TOKENS, []
        for first in range(0, part.count, at_once):
            groups = min(at_once, part.count - first)
            rows = memory[: groups * GROUP_TOKENS]
            stored.prefix.read_groups(part.chunk, layer, first, rows)
            sums.append(sums_of(rows, np.arange(len(rows))))
        return np.concatenate(sums)
