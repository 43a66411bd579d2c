# SPDX-License-Identifier: Apache-2.0
"""Rows of one selection that were sent to a GPU before attention asked for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.gpu.incoming_rows import IncomingRows


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
