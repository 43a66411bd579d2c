# SPDX-License-Identifier: Apache-2.0
"""Keys and values of rows that come to a GPU through staging buffers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.row_states import RowStates
from hillinfer.counters import Counters
from hillinfer.gpu.copies_ahead import IncomingRows
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.gpu.staging_ring import StagingRing
from hillinfer.storage.row_layout import RowLayout


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
