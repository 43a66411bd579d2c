# SPDX-License-Identifier: Apache-2.0
"""Rows that were brought together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.read_cost import ReadCost


@dataclass(frozen=True)
class GatheredRows:
    """Rows in a buffer, which of them came from the drive, and what that took.

    Parameters
    ----------
    rows
        uint8 of shape (rows, row_bytes).
    cold
        int64, which of them came from the drive, read ahead or not.
    cost
        What reading now took.
    """

    rows: NDArray[np.uint8]
    cold: NDArray[np.int64]
    cost: ReadCost
