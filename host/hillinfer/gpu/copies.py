# SPDX-License-Identifier: Apache-2.0
"""Rows on their way to a GPU; new tokens' rows and predicted queries on their way back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.row_attention import RowStates
from hillinfer.errors import CacheUseError
from hillinfer.gpu.staging import Copy, CopyLane, StagingRing
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import RowLayout, Sequence
from hillinfer.native.library import native_library
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder

# --- Rows in staging memory ---


class StagedStates(RowStates):
    """Brings blocks of rows to a GPU beside the compute on the blocks before.

    `lane` copies through the buffers of `ring`.
    """

    def __init__(
        self, layout: RowLayout, counters: Counters, lane: CopyLane, ring: StagingRing
    ) -> None:
        super().__init__(layout, counters)
        self._lane = lane
        self._ring = ring

    def bring(self, rows: NDArray[np.uint8], like: torch.Tensor) -> torch.Tensor:
        """Return rows beside the model; those given may change at once."""
        incoming = IncomingRows(self._lane, self._ring, len(rows), rows.shape[1])
        incoming.add(rows)
        return self.taken(incoming)

    def taken(self, incoming: IncomingRows) -> torch.Tensor:
        """Return rows that are on their way, and count them."""
        rows = incoming.take()
        self._counters.host_to_device_bytes += rows.numel()
        return rows


# --- Rows of predicted selections ---


class IncomingRows:
    """Copies rows to one array beside the model, in the order in which they are given.

    A piece is staged while the one before it is copied. One thread gives rows, and then one takes
    them. The buffers of `ring` are of at least one row each; the array is of `most_rows` rows.
    """

    def __init__(self, lane: CopyLane, ring: StagingRing, most_rows: int, row_bytes: int) -> None:
        self._lane = lane
        self._ring = ring
        self._row_bytes = row_bytes
        self.piece_rows = ring.buffers.shape[1] // row_bytes
        self._target = lane.allocate(most_rows, row_bytes)
        self._copies: list[Copy] = []
        self.count = 0

    def add(self, rows: NDArray[np.uint8]) -> None:
        """Copy rows, uint8 (rows, row_bytes), which may change as soon as this returns."""
        for start in range(0, len(rows), self.piece_rows):
            piece = rows[start : start + self.piece_rows]
            self.fill(len(piece), partial(_copy, piece))

    def add_from(self, addresses: NDArray[np.uint64]) -> None:
        """Copy rows that lie at uint64 addresses."""
        for start in range(0, len(addresses), self.piece_rows):
            piece = addresses[start : start + self.piece_rows]
            self.fill(len(piece), partial(native_library().copy_rows, piece))

    def fill(self, most_rows: int, fill: Callable[[NDArray[np.uint8]], int]) -> None:
        """Copy what a function writes.

        `fill` writes the first rows of a uint8 array (most_rows, row_bytes) and says how many, at
        most `piece_rows`.
        """
        buffer = self._ring.acquire()
        try:
            staged = self._ring.buffers[buffer, : most_rows * self._row_bytes]
            staged = staged.reshape(most_rows, self._row_bytes)
            count = fill(staged)
            if not count:
                self._ring.give(buffer)
                return
            place = self._target[self.count : self.count + count]
            copy = self._lane.to_gpu(place, torch.from_numpy(staged[:count]))
        except BaseException:
            self._ring.give(buffer)
            raise
        self._ring.leave(buffer, copy)
        self._copies.append(copy)
        self.count += count

    def take(self) -> torch.Tensor:
        """Return the rows, uint8 (count, row_bytes), for the model to compute with from here on."""
        for copy in self._copies:
            self._lane.compute_waits(copy, self._target)
        return self._target[: self.count]


@dataclass(frozen=True, eq=False)
class CopiedRows:
    """Which rows are on their way.

    `positions`, int64 and ascending, are a part of the selection, and `rows` theirs in that order.
    """

    positions: NDArray[np.int64]
    rows: IncomingRows


class CopiesAhead:
    """Gathers hot and landed rows straight into staging buffers and copies them (APP).

    A thread of its own, so that scoring for the next layer does not wait for the drive. A row never
    changes, so what was copied holds, wherever the row lies when attention looks again. `gather`
    knows where rows lie.
    """

    def __init__(
        self,
        lane: CopyLane,
        ring: StagingRing,
        gather: Gather,
        row_bytes: int,
        recorder: Recorder = SILENT,
    ) -> None:
        self._lane = lane
        self._ring = ring
        self._gather = gather
        self._row_bytes = row_bytes
        self._recorder = recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-copy-ahead")
        self._under_way: set[Future[CopiedRows]] = set()

    def begin(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        on_drive: int,
        landed: LandedRows | None,
    ) -> Future[CopiedRows]:
        """Begin to copy what of a selection is in memory, or lands there.

        Parameters are as in `Gather.land`; `landed` is what it returned. Returns what is on its
        way, once all of it is.
        """
        copied = self._thread.submit(self._copy, layer, sequence, positions, on_drive, landed)
        self._under_way.add(copied)
        # What is over is not held here: it holds rows in the GPU's memory.
        copied.add_done_callback(self._under_way.discard)
        return copied

    def settle(self) -> None:
        """Wait until no row is being gathered, whatever became of it."""
        wait([copied for copied in list(self._under_way) if not copied.cancelled()])
        self._under_way.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _copy(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        on_drive: int,
        landed: LandedRows | None,
    ) -> CopiedRows:
        if landed is not None and landed.fault() is not None:
            # Told where attention asks for these rows.
            landed = None
        rows = IncomingRows(self._lane, self._ring, len(positions), self._row_bytes)
        found: list[NDArray[np.int64]] = [positions[:0]]
        for start in range(0, len(positions), rows.piece_rows):
            piece = positions[start : start + rows.piece_rows]

            def gather(out: NDArray[np.uint8], piece: NDArray[np.int64] = piece) -> int:
                held = self._gather.copy_held(layer, sequence, piece, on_drive, landed, out)
                found.append(piece[held])
                return len(held)

            with self._recorder.span(Lane.COPIES, "stage", layer=layer, rows=len(piece)):
                rows.fill(len(piece), gather)
        return CopiedRows(np.concatenate(found), rows)


def _copy(rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    out[:] = rows
    return len(rows)


# --- Packed rows ---


def packed_rows(keys: torch.Tensor, values: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return what `RowLayout.pack` writes, uint8 (tokens, row_bytes), beside the model.

    Keys and values are of the stored type and (kv_heads, tokens, head_dim).
    """
    tokens = keys.shape[1]
    parts = [states.transpose(0, 1).reshape(tokens, -1) for states in (keys, values)]
    filled = 2 * parts[0].shape[1]
    padding = keys.new_zeros((tokens, row_bytes // keys.element_size() - filled))
    return torch.cat([*parts, padding], dim=1).view(torch.uint8)


# --- New tokens' rows ---


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A row, the buffer it arrives in, and its place in the open group."""

    row: torch.Tensor
    buffer: int
    place: NDArray[np.uint8]


class ArrivingRows:
    """Lets a decode step go on while its keys and values come back (HillInfer, section 4.3).

    The model's GPU attends to the new row where it was made; the host wants it for scoring and for
    the drive in later steps. So the place in the open group is taken at once and filled when
    somebody is about to look, or when no buffer is free. One thread calls. The buffers of `ring`
    are of one row each.
    """

    def __init__(self, lane: CopyLane, ring: StagingRing) -> None:
        self._lane = lane
        self._ring = ring
        self._arriving: dict[tuple[int, int], _Arriving] = {}
        self._failure: Exception | None = None

    def begin(
        self, layer: int, sequence: Sequence, row: torch.Tensor, place: NDArray[np.uint8]
    ) -> None:
        """Begin to bring a row back.

        `row` is uint8 (1, row_bytes) beside the model, `place` uint8 (row_bytes,), where it
        belongs; it is the newest token's of `sequence`.
        """
        if len(self._arriving) == len(self._ring.buffers):
            self._fill(next(iter(self._arriving)))
        buffer = self._ring.acquire()
        try:
            staged = torch.from_numpy(self._ring.buffers[buffer])[None]
            self._ring.arrive(buffer, self._lane.from_gpu(staged, row))
        except BaseException:
            self._ring.give(buffer)
            raise
        self._arriving[layer, id(sequence)] = _Arriving(row, buffer, place)

    def newest(self, layer: int, sequence: Sequence) -> torch.Tensor | None:
        """Return the row that is on its way, uint8 (1, row_bytes) beside the model, if one is."""
        arriving = self._arriving.get((layer, id(sequence)))
        return None if arriving is None else arriving.row

    def wait(self) -> None:
        """Wait until no row is on its way; `settle` tells what went wrong."""
        while self._arriving:
            self._fill(next(iter(self._arriving)))

    def settle(self) -> None:
        """Wait until every row is in its place.

        Raises CacheUseError where one never came: from then on always, because the cache has a
        hole.
        """
        self.wait()
        if self._failure is not None:
            raise CacheUseError(
                f"a new token's row did not come back from the GPU ({self._failure}): this cache "
                "is no longer whole; close it and read the prompt again with another"
            ) from self._failure

    def _fill(self, key: tuple[int, int]) -> None:
        arriving = self._arriving[key]
        # An interrupt leaves everything as it is: who waits next fills it.
        try:
            arriving.place[:] = self._ring.arrived(arriving.buffer)
        except Exception as error:
            self._failure = error
        self._ring.give(arriving.buffer)
        del self._arriving[key]


# --- Predicted queries ---


class BroughtQueries:
    """Lets the thread that drives the model go on; the one that scores waits for the query.

    The buffers of `ring` are of one query each.
    """

    def __init__(self, lane: CopyLane, ring: StagingRing) -> None:
        self._lane = lane
        self._ring = ring
        self._under_way: set[int] = set()

    def bring(self, query: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to bring a query, (query_heads, head_dim) beside the model, back.

        Returns what returns it, float32 on the host, once it is there; called once, from any
        thread.
        """
        wide = query.float().contiguous()
        buffer = self._ring.acquire_free()
        if buffer is None:
            # A batch announces as many queries as it has sequences.
            here = wide.cpu()
            return lambda: here
        place = torch.from_numpy(self._ring.buffers[buffer][: wide.numel() * 4])
        try:
            copy = self._lane.from_gpu(place.view(torch.float32).view(wide.shape), wide)
        except BaseException:
            self._ring.give(buffer)
            raise
        self._ring.arrive(buffer, copy)
        self._under_way.add(buffer)
        return lambda: self._arrived(buffer, wide.shape)

    def settle(self) -> None:
        """Free the buffers of queries that nobody asked for; nobody is about to."""
        while self._under_way:
            # What went wrong is told to whoever asks for the query.
            with suppress(Exception):
                self._arrived(next(iter(self._under_way)), torch.Size([0]))

    def _arrived(self, buffer: int, shape: torch.Size) -> torch.Tensor:
        # An interrupt leaves the buffer as it is: `settle` frees it.
        try:
            items = self._ring.arrived(buffer).view(np.float32)[: shape.numel()].copy()
        except Exception:
            self._free(buffer)
            raise
        self._free(buffer)
        return torch.from_numpy(items).view(shape)

    def _free(self, buffer: int) -> None:
        self._under_way.discard(buffer)
        self._ring.give(buffer)
