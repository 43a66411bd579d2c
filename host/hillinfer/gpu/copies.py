# SPDX-License-Identifier: Apache-2.0
"""Selected rows on their way to a GPU, before or when attention asks for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.softmax_merge import RowStates
from hillinfer.gpu.copy_lanes import Copy, CopyLane
from hillinfer.gpu.staging import StagingRing
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import RowLayout, Sequence
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder

# --- Rows in staging memory ---


class StagedStates(RowStates):
    """Brings blocks of rows to a GPU beside the compute on the blocks before.

    Parameters
    ----------
    layout, counters
        As for `RowStates`.
    lane, ring
        What copies, and through which buffers.
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
    them.

    Parameters
    ----------
    lane, ring
        What copies, and through which buffers; of at least one row each.
    most_rows, row_bytes
        Size of the array.
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

    def fill(self, most_rows: int, fill: Callable[[NDArray[np.uint8]], int]) -> None:
        """Copy what a function writes.

        Parameters
        ----------
        most_rows
            At most `piece_rows`.
        fill
            Writes the first rows of a uint8 array (most_rows, row_bytes), and says how many.
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

    Parameters
    ----------
    positions
        int64, ascending: a part of the selection.
    rows
        Theirs, in that order.
    """

    positions: NDArray[np.int64]
    rows: IncomingRows


class CopiesAhead:
    """Gathers hot and landed rows straight into staging buffers and copies them (APP).

    A thread of its own, so that scoring for the next layer does not wait for the drive. A row never
    changes, so what was copied holds, wherever the row lies when attention looks again.

    Parameters
    ----------
    lane, ring
        What copies, and through which buffers.
    gather
        Knows where rows lie.
    row_bytes
        Bytes of a row.
    recorder
        Notes how long gathering takes.
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
        self._under_way: list[Future[CopiedRows]] = []

    def begin(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        on_drive: int,
        landed: LandedRows | None,
    ) -> Future[CopiedRows]:
        """Begin to copy what of a selection is in memory, or lands there.

        Parameters
        ----------
        layer, sequence, positions, on_drive
            As in `Gather.land`.
        landed
            What it returned.

        Returns
        -------
        What is on its way, once all of it is.
        """
        copied = self._thread.submit(self._copy, layer, sequence, positions, on_drive, landed)
        # What is over is not held here: it holds rows in the GPU's memory.
        self._under_way = [one for one in self._under_way if not one.done()]
        self._under_way.append(copied)
        return copied

    def settle(self) -> None:
        """Wait until no row is being gathered, whatever became of it."""
        wait([copied for copied in self._under_way if not copied.cancelled()])
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
        if landed is not None and landed.reading.exception() is not None:
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
