# SPDX-License-Identifier: Apache-2.0
"""What a pool policy knows of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowHistory:
    """Some rows of one layer and how they were used; all arrays have the shape (rows,).

    Parameters
    ----------
    positions
        int32, logical positions of the tokens.
    counts
        uint16, the hit-rate table's entries.
    last_selected
        int32, the step each row was last selected or written in.
    lengths
        int32, context length N of the sequence each row belongs to, at its last step; of a row
        that several sequences share, that of the one that went on last.
    alpha
        Importance rate α.
    """

    positions: NDArray[np.int32]
    counts: NDArray[np.uint16]
    last_selected: NDArray[np.int32]
    lengths: NDArray[np.int32]
    alpha: float
