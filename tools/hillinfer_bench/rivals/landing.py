# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory that fetched units land in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import round_up
from hillinfer_bench.rivals.meter import Meter
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Enough scattered reads that the drive's queue is empty for a small part of the time only.
_PIECE_BYTES = 4 * 1024 * 1024
# One piece is attended to while the next one comes.
_ATTENDED = 2


def piece_units(most: int, unit_rows: int, row_bytes: int) -> int:
    """Return how many units a piece takes: 4 MiB or `most`, in multiples of 64 rows."""
    rows = min(_PIECE_BYTES // row_bytes, round_up(most * unit_rows, GROUP_TOKENS))
    return max(GROUP_TOKENS, rows // GROUP_TOKENS * GROUP_TOKENS) // unit_rows


def piece_counts(
    ahead_rows: int, fetches: int, most: int, unit_rows: int, row_bytes: int
) -> tuple[int, int]:
    """Return how many pieces only a layer that attends may take, and how many any may.

    Parameters
    ----------
    ahead_rows
        Rows that may be read ahead, rounded up to pieces.
    fetches
        How many may be under way before their layer attends.
    most
        The most units of one fetch.
    unit_rows, row_bytes
        Rows of a unit, and bytes of a row.
    """
    units = piece_units(most, unit_rows, row_bytes)
    needed = -(-most // units)
    ahead = min(fetches * needed, -(-ahead_rows // (units * unit_rows)))
    return min(_ATTENDED, needed), ahead


class Landing:
    """Pieces for all fetches of a rival; one thread at a time may use it.

    Parameters
    ----------
    meter
        Counts them.
    ahead_rows, fetches, most, unit_rows, row_bytes
        As in `piece_counts`.
    """

    def __init__(
        self,
        meter: Meter,
        ahead_rows: int,
        fetches: int,
        most: int,
        unit_rows: int,
        row_bytes: int,
    ) -> None:
        self._kept, ahead = piece_counts(ahead_rows, fetches, most, unit_rows, row_bytes)
        units = piece_units(most, unit_rows, row_bytes)
        size = self._kept + ahead, units, unit_rows * row_bytes
        self._memory = meter.buffer(int(np.prod(size))).reshape(size)
        self._free = list(range(len(self._memory)))

    def take_attending(self) -> int | None:
        """Take a piece for the layer that attends; None where none is free."""
        return self._free.pop() if self._free else None

    def take_ahead(self) -> int | None:
        """Take a piece for a later layer; None where only those for the one that attends are."""
        return self._free.pop() if len(self._free) > self._kept else None

    def give(self, piece: int) -> None:
        """Give a piece back."""
        self._free.append(piece)

    def of(self, piece: int) -> NDArray[np.uint8]:
        """Return a piece's memory, page-aligned uint8 (units, unit_bytes)."""
        own: NDArray[np.uint8] = self._memory[piece]
        return own

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._memory = np.empty((0, 0, 0), np.uint8)
        self._free = []
