# SPDX-License-Identifier: Apache-2.0
"""Rows that might become hot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Candidates:
    """Rows that are in memory at the moment and not in the hot pool.

    Parameters
    ----------
    rows
        int64 row numbers, each once.
    positions
        int32, their logical positions.
    counts
        uint16, their hits.
    source
        uint8 of shape (any, row_bytes), where their bytes lie.
    places
        int64, which rows of `source` they are.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int32]
    counts: NDArray[np.uint16]
    source: NDArray[np.uint8]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)
