# SPDX-License-Identifier: Apache-2.0
"""Buffers that fetched units land in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.rivals.fetch_thread import PIECES_AHEAD
from hillinfer.rivals.meter import Meter
from hillinfer.storage.aligned_buffer import round_up
from hillinfer_model.kernel_spec import GROUP_TOKENS

_LANDING_BYTES = 4 * 1024 * 1024


def landing_units(most: int, unit_rows: int, row_bytes: int) -> int:
    """Return how many units a buffer takes: `most`, or where 4 MiB do not hold them, half of that.

    Together they are a multiple of 64 rows, and 64 at least.
    """
    rows = round_up(most * unit_rows, GROUP_TOKENS)
    if rows * row_bytes > _LANDING_BYTES:
        rows = _LANDING_BYTES // PIECES_AHEAD // row_bytes
    return max(GROUP_TOKENS, rows // GROUP_TOKENS * GROUP_TOKENS) // unit_rows


def landing_buffers(most: int, unit_rows: int, row_bytes: int) -> int:
    """Return how many buffers a fetch takes: one, or two in turns where `most` do not fit."""
    return 1 if landing_units(most, unit_rows, row_bytes) >= most else PIECES_AHEAD


class Landing:
    """Buffers for several fetches at once.

    Parameters
    ----------
    meter
        Counts them.
    fetches
        How many at once.
    most
        The most units of one fetch.
    unit_rows, row_bytes
        Rows of a unit, and bytes of a row.
    """

    def __init__(
        self, meter: Meter, fetches: int, most: int, unit_rows: int, row_bytes: int
    ) -> None:
        size = (
            fetches,
            landing_buffers(most, unit_rows, row_bytes),
            landing_units(most, unit_rows, row_bytes),
            unit_rows * row_bytes,
        )
        self._memory = meter.buffer(int(np.prod(size))).reshape(size)

    def of(self, fetch: int) -> NDArray[np.uint8]:
        """Return the buffers of one fetch, uint8 (buffers, units, unit_bytes)."""
        own: NDArray[np.uint8] = self._memory[fetch]
        return own

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._memory = np.empty((0, 0, 0, 0), np.uint8)
