# SPDX-License-Identifier: Apache-2.0
"""Rows on their way to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.gpu.copy_lane import Copy, CopyLane
from hillinfer.gpu.staging_ring import StagingRing


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


def _copy(rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    out[:] = rows
    return len(rows)
