# SPDX-License-Identifier: Apache-2.0
"""Sends the rows of a predicted selection to a GPU while the layer before computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.gpu.copied_rows import CopiedRows
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.incoming_rows import IncomingRows
from hillinfer.gpu.staging_ring import StagingRing
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.row_reader import RowReader
from hillinfer.storage.sequence import Sequence
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT


class CopiesAhead:
    """Gathers hot and landed rows straight into staging buffers and copies them (APP).

    A thread of its own, so that scoring for the next layer does not wait for the drive. A row never
    changes, so what was copied holds, wherever the row lies when attention looks again.

    Parameters
    ----------
    lane, ring
        What copies, and through which buffers.
    reader
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
        reader: RowReader,
        row_bytes: int,
        recorder: Recorder = SILENT,
    ) -> None:
        self._lane = lane
        self._ring = ring
        self._reader = reader
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
            As in `RowReader.land`.
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
                held = self._reader.copy_held(layer, sequence, piece, on_drive, landed, out)
                found.append(piece[held])
                return len(held)

            with self._recorder.span(Lane.COPIES, "stage", layer=layer, rows=len(piece)):
                rows.fill(len(piece), gather)
        return CopiedRows(np.concatenate(found), rows)
