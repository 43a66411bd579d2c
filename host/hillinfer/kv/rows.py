# SPDX-License-Identifier: Apache-2.0
"""The sequences of an engine and the life of their rows, from append to write-back."""

from __future__ import annotations

import ctypes
import math
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import aligned_buffer
from hillinfer.drive.regions import GroupTable, WriteElsewhere
from hillinfer.extents.recording import Recorded
from hillinfer.extents.shared_chunks import SharedChunks
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.sequence import NUMBER_TYPES, RowLayout, Sequence, observed_bytes
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape
from hillinfer.native.library import native_library
from hillinfer.native.structures import Shape
from hillinfer.statistics import Counters
from hillinfer_model.kernel_spec import GROUP_TOKENS


class WriteBack:
    """Two buffers of whole groups: one is filled while the other is written.

    Parameters
    ----------
    buffer_rows
        Rows of one buffer, a multiple of 64.
    """

    def __init__(
        self, store: ColdStore, buffer_rows: int, row_bytes: int, counters: Counters
    ) -> None:
        self._store = store
        self._counters = counters
        self.buffer_groups = buffer_rows // GROUP_TOKENS
        size = buffer_rows * row_bytes
        self._buffers = [
            aligned_buffer(size)[:size].reshape(buffer_rows, row_bytes) for _ in range(2)
        ]
        # Who is sent somebody looks at; any other one is free, whatever an error or an interrupt
        # left in it.
        self._is_sent = [False, False]
        # Says that one became free since it was emptied. No condition: an interrupt in the middle
        # of one's own frames leaves its lock taken.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def buffer(self) -> NDArray[np.uint8]:
        """Return a buffer to fill, uint8 (buffer_rows, row_bytes), waiting until one is free.

        It is the same one until it is sent: one thread at a time fills.
        """
        started = time.perf_counter()
        while not self._came.empty():
            self._came.get()
        while all(self._is_sent):
            # What is put off otherwise has to go now.
            self._store.turns.hurry(self._came.get)
        self._counters.drive_wait_seconds += time.perf_counter() - started
        return self._buffers[self._is_sent.index(False)]

    def send(
        self,
        layer: int,
        groups: NDArray[np.int64],
        buffer: NDArray[np.uint8],
        promoting: Future[tuple[int, int]] | None,
        elsewhere: WriteElsewhere | None,
    ) -> None:
        """Queue the first rows of a buffer to be written.

        Parameters
        ----------
        layer, groups
            Where to: int64 group numbers, one per 64 rows.
        promoting
            Who else looks at it, until it is done.
        elsewhere
            Writes what it can to another file than the cold pool's own.
        """
        rows = buffer[: len(groups) * GROUP_TOKENS]
        (which,) = (at for at, own in enumerate(self._buffers) if own is buffer)

        def written() -> None:
            if promoting is None:
                self._free(which)
            else:
                # Also called where it is done already, or cancelled.
                promoting.add_done_callback(lambda _: self._free(which))

        try:
            self._is_sent[which] = True
            self._store.write_groups(layer, groups, rows, written, elsewhere)
        except BaseException:
            # An interrupt leaves open whether it stands in line; behind it nobody writes it.
            with suppress(RuntimeError):
                self._store.behind_writes(partial(self._free, which)).result()
            raise

    def _free(self, which: int) -> None:
        self._is_sent[which] = False
        self._came.put(None)


class SequenceManager:
    """Opens, forks, cuts and frees sequences and takes their new rows in."""

    def __init__(
        self,
        shape: ModelShape,
        layout: RowLayout,
        store: ColdStore,
        groups: GroupTable,
        write_back: WriteBack,
        gather: Gather,
        pools: HotPools,
        manager: PoolManager,
        shadow: SequenceShadows,
        accountant: Accountant,
        chunks: SharedChunks,
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._store = store
        self._groups = groups
        self._write_back = write_back
        self._gather = gather
        self._pools = pools
        self._manager = manager
        self._shadow = shadow
        self._accountant = accountant
        self._chunks = chunks
        self.sequences = sequences = list[Sequence]()
        # Groups that sequences have no more and that are counted as theirs, until they are given
        # back: where an interrupt breaks that off, the next who gives any back ends it.
        self._going: list[int] = []
        # Not by way of this manager, which holds the accountant.
        accountant.shared_by(lambda: sum(one.band.start == 0 for one in sequences))
        self._store_token: Callable[..., int] = native_library().tables.hillinfer_store_token
        self._states = Shape(kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self._states_address = ctypes.addressof(self._states)
        # What becomes a row by itself: numbers of the stored type, and float32 that becomes FP16.
        stored = layout.stored_type
        self._number_types = {stored: NUMBER_TYPES[stored]}
        if stored is torch.float16:
            self._number_types[torch.float32] = NUMBER_TYPES[torch.float32]

    @property
    def tokens(self) -> int:
        """Number of all distinct tokens, those of some layers counted as that part of a token."""
        open_rows = sum(one.tokens % GROUP_TOKENS * len(one.band) for one in self.sequences)
        settled = self._groups.parts_in_use * GROUP_TOKENS
        return math.ceil(round(settled + open_rows / self._shape.layers, 3))

    def tokens_with(self, sequence: Sequence, tokens: int) -> int:
        """Return what `tokens` will be with so many more in a sequence of the cache."""
        return self.tokens + math.ceil(tokens * len(sequence.band) / self._shape.layers)

    def open(self) -> Sequence:
        """Return a new, empty sequence."""
        return self._open(partial(Sequence, self._shape.layers, self._shape.row_bytes))

    def _open(self, make: Callable[[], Sequence], hit_bytes: int = 0) -> Sequence:
        self._pools.take_tail()
        try:
            with self._accountant.taking(Part.OTHER, hit_bytes + self._observed_bytes):
                sequence = make()
        except BaseException:
            self._pools.give_tail()
            raise
        # No call, behind which Ctrl-C comes: what is known here is what the caller gets.
        self.sequences += [sequence]
        return sequence

    def open_bands(self, sequence: Sequence, starts: Iterable[int]) -> None:
        """Let a sequence have fewer new rows from each of these layers on; the others are shared.

        Raises BudgetError where the budget does not hold their open groups: there are none then.
        """
        self._drop_bands(sequence)
        borders = [*starts, self._shape.layers]
        try:
            for layers in map(range, borders, borders[1:]):
                sequence.deepen(self._fork_band(sequence))
                sequence.deeper[-1].become_band(layers)
        except BaseException:
            self._drop_bands(sequence)
            raise
        sequence.band = range(sequence.band.start, borders[0])

    def _drop_bands(self, sequence: Sequence) -> None:
        while sequence.deeper:
            self.release(sequence.deeper[-1])
            sequence.deeper.pop()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens; full groups and segments are shared."""
        copy = self._fork_band(sequence)
        try:
            for one in sequence.deeper:
                copy.deepen(self._fork_band(one))
        except BaseException:
            self.release(copy)
            raise
        return copy

    def _fork_band(self, sequence: Sequence) -> Sequence:
        copy, shared = self._open(sequence.fork, sequence.hits.byte_count), list[int]()
        try:
            for group in copy.groups:
                self._groups.share(group)
                shared.append(group)
            copy.segments = self._shadow.share(sequence)
        except BaseException:
            # Ctrl-C: groups that are not shared are none of the copy's to give back.
            copy.truncate(0)
            self._give_groups(shared)
            self.release(copy)
            raise
        return copy

    def release(self, sequence: Sequence) -> None:
        """Free whatever only this sequence owned, also where storing its rows is told to fail.

        After an interrupt the next call frees the rest; harmless when done twice.
        """
        if sequence not in self.sequences:
            return
        self._drop_bands(sequence)
        try:
            self.settle_recording(sequence)
        finally:
            self._tell_hits(sequence)
            self._shadow.truncate(sequence, 0)
            self._give_groups(sequence.truncate(0))
            self._pools.hits.forget(sequence)
            del sequence.token_ids[:]
            counted = sequence.hits.byte_count + self._observed_bytes
            # What comes behind this is not done twice.
            self.sequences.remove(sequence)
            self._accountant.give(Part.OTHER, counted)
            self._pools.give_tail()

    def note_pass(self, sequence: Sequence) -> None:
        """Learn that a pass is through, and publish what it made whole."""
        recording = sequence.recording
        if recording is None:
            return
        if recording.is_done:
            sequence.recording = None
        elif recording.awaits(min(sequence.lengths)):
            recording.publish(_recorded(sequence))

    def end_recording(self, sequence: Sequence) -> None:
        """Publish all full groups and record no more, behind what is queued."""
        recording = sequence.recording
        if recording is not None and not recording.is_ended:
            recording.finish(_recorded(sequence))

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from position `length` on, in every layer.

        Rows of a deeper band that lie behind one that goes, of tokens that stay, are lacking then.
        """
        cuts = [(one, one.rows_until(length)) for one in sequence.deeper]
        self._truncate([*cuts, (sequence, length)])
        for one in sequence.deeper:
            one.keep(one.kept[one.kept < length], min(length, one.kept_until))

    def cut_band(self, band: Sequence, rows: int) -> None:
        """Leave one band its first rows, which are those of the first tokens."""
        self._truncate([(band, rows)])
        band.keep(np.arange(rows), rows)

    def _truncate(self, cuts: list[tuple[Sequence, int]]) -> None:
        # Whatever may fail, reading rows back and copying a shared segment, comes before anything
        # of any band changes.
        with ExitStack() as taken:
            for own, _ in cuts:
                self.settle_recording(own)
            tails = [self._tails_behind(own, rows, taken) for own, rows in cuts]
            for own, rows in cuts:
                self._shadow.truncate(own, rows)
            for (own, rows), (layers, kept) in zip(cuts, tails, strict=True):
                own.tails[layers, : kept.shape[1]] = kept
                self._tell_hits(own)
                if max(own.lengths) > rows:
                    own.observed = [None] * self._shape.layers
                self._give_groups(own.truncate(rows))
                del own.token_ids[rows:]

    def _tails_behind(
        self, sequence: Sequence, length: int, taken: ExitStack
    ) -> tuple[list[int], NDArray[np.uint8]]:
        """Return the layers whose open group is another one of fewer rows, and what is in it."""
        start = length // GROUP_TOKENS * GROUP_TOKENS
        reopened = [
            layer
            for layer, old in enumerate(sequence.lengths)
            if old > length and sequence.tail_start(layer) != start
        ]
        size = len(reopened) * (length - start) * self._shape.row_bytes
        self._accountant.take(Part.STAGING, size)
        taken.callback(self._accountant.give, Part.STAGING, size)
        tails = np.empty((len(reopened), length - start, self._shape.row_bytes), np.uint8)
        for tail, layer in zip(tails, reopened, strict=True):
            done = 0
            for rows in self._gather.stream(layer, sequence, np.arange(start, length)):
                tail[done : done + len(rows)] = rows
                done += len(rows)
        return reopened, tails

    def append(
        self,
        layer: int,
        sequence: Sequence,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: int,
    ) -> None:
        """Store the rows of new tokens.

        Full groups go to the drive in the background, the rest stays in the open group.

        Parameters
        ----------
        keys, values
            Stored type, (kv_heads, tokens, head_dim), on the CPU.
        """
        tail = sequence.tails[layer]
        tokens, done = keys.shape[1], 0
        while done < tokens:
            filled = sequence.lengths[layer] % GROUP_TOKENS
            if filled + tokens - done < GROUP_TOKENS:
                end = filled + tokens - done
                own = (keys[:, done:], values[:, done:]) if done else (keys, values)
                self._layout.pack(*own, tail[filled:end])
                length = sequence.lengths[layer]
                sequence.set_length(layer, length + tokens - done, sequence.tail_start(layer))
                break
            groups = min((filled + tokens - done) // GROUP_TOKENS, self._write_back.buffer_groups)
            taken = groups * GROUP_TOKENS - filled
            first = sequence.lengths[layer] // GROUP_TOKENS
            numbers = self._group_numbers(sequence, first, groups)
            positions = np.arange(first * GROUP_TOKENS, (first + groups) * GROUP_TOKENS)
            buffer = self._write_back.buffer()
            buffer[:filled] = tail[:filled]
            self._layout.pack(
                keys[:, done : done + taken],
                values[:, done : done + taken],
                buffer[filled : groups * GROUP_TOKENS],
            )
            promoting, elsewhere = None, None
            # A single token is attended to before its group may push out what it attends to.
            if tokens > 1:
                promoting = self._manager.offer_written(layer, sequence, positions, buffer, step)
            if sequence.recording is not None:
                elsewhere = sequence.recording.elsewhere(layer, first, numbers)
            self._write_back.send(layer, numbers, buffer, promoting, elsewhere)
            sequence.counters.cold_write_bytes += numbers.size * GROUP_TOKENS * buffer.shape[1]
            # Until here the open group is as it was, for whoever forgets what came; from here on
            # it is read where groups are written.
            length, is_last = sequence.lengths[layer] + taken, done + taken == tokens
            sequence.set_length(layer, length, length - is_last * GROUP_TOKENS)
            if is_last:
                # Nobody fills the buffer but this thread.
                tail[:] = buffer[taken + filled - GROUP_TOKENS : taken + filled]
            done += taken

    def append_token(
        self,
        layer: int,
        sequence: Sequence,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch_row: int,
    ) -> int | None:
        """Store the row of one token as the model made it, in one native call.

        Parameters
        ----------
        keys, values
            (batch, kv_heads, 1, head_dim) of the model's type.

        Returns
        -------
        How many finite values did not fit FP16; None, and nothing is taken in, where `append` must
        do it: the token fills its group, or the numbers are not where the library finds them.
        """
        length = sequence.lengths[layer]
        number_type = self._number_types.get(keys.dtype)
        if (length + 1) % GROUP_TOKENS == 0 or number_type is None or values.dtype != keys.dtype:
            return None
        strides, value_strides = keys.stride(), values.stride()
        if not (keys.is_cpu and strides[3] == value_strides[3] == 1):
            return None
        # A microsecond, for which Python's global lock is kept.
        return self._store_token(
            sequence.table_addresses[layer],
            self._states_address,
            number_type,
            keys.data_ptr() + batch_row * strides[0] * keys.itemsize,
            strides[1],
            values.data_ptr() + batch_row * value_strides[0] * keys.itemsize,
            value_strides[1],
        )

    def newest_keys(self, layer: int, sequence: Sequence) -> torch.Tensor:
        """Return the keys of the newest token, stored type, (kv_heads, 1, head_dim), a view."""
        place = sequence.lengths[layer] - 1 - sequence.held_starts[layer]
        row = torch.from_numpy(sequence.tails[layer, place : place + 1])
        return self._layout.keys(row).transpose(0, 1)

    def reserve(self, layer: int, sequence: Sequence) -> NDArray[np.uint8] | None:
        """Take one token in whose row, uint8 (row_bytes,), is to be filled before anyone looks.

        None, and nothing is taken in, where it would fill its group, which goes to the drive.
        """
        length = sequence.lengths[layer]
        filled = length % GROUP_TOKENS
        if filled + 1 == GROUP_TOKENS:
            return None
        sequence.set_length(layer, length + 1, length - filled)
        place: NDArray[np.uint8] = sequence.tails[layer, filled]
        return place

    def offer_filled(self, layer: int, sequence: Sequence, step: int) -> None:
        """Let the rows of a group that a single token filled be hot, once it was attended to."""
        start, length = sequence.held_starts[layer], sequence.lengths[layer]
        if length - start == GROUP_TOKENS:
            positions = np.arange(start, length)
            self._manager.offer_written(layer, sequence, positions, sequence.tails[layer], step)
            # The next token writes to the tail.
            self._pools.settle(layer)
            self._shadow.keep_filled(layer, sequence)

    def _tell_hits(self, sequence: Sequence) -> None:
        for layer in range(self._shape.layers):
            self._pools.hits.tell_of(layer, sequence)

    @property
    def _observed_bytes(self) -> int:
        return observed_bytes(self._shape, self._manager.observed_queries)

    def _group_numbers(self, sequence: Sequence, first: int, count: int) -> NDArray[np.int64]:
        while sequence.group_count < first + count:
            sequence.append_groups([self._groups.take(len(sequence.band) / self._shape.layers)])
        self._pools.cover(self._groups.groups * GROUP_TOKENS)
        self._store.cover(self._groups.groups)
        return np.asarray(sequence.groups[first : first + count], np.int64)

    def _give_groups(self, groups: list[int]) -> None:
        self._going.extend(groups)
        given = self._groups.of_one_owner(self._going)
        for group in given:
            self._pools.forget_group(group)
        self._shadow.forget_groups(given)
        self._chunks.forget(given)
        # Last: after an interrupt before that nobody gets a number that old rows are known by.
        self._groups.give_all(self._going)
        self.close_bases()

    def settle_recording(self, sequence: Sequence) -> None:
        """Wait until what is queued of a sequence's groups is written: others may get them."""
        recording = sequence.recording
        if recording is not None:
            self.end_recording(sequence)
            recording.settle()
            sequence.recording = None

    def close_bases(self) -> None:
        """Close the files of sessions whose rows nobody has any more."""
        # Numbers are free once nothing tells any more that they lie there.
        self._groups.close_idle_regions(self._store.others.drop_base)


def _recorded(sequence: Sequence) -> Recorded:
    return Recorded(
        min(sequence.lengths),
        np.array(sequence.token_ids, np.int64),
        np.array(sequence.groups, np.int64),
        sequence.segments,
    )
