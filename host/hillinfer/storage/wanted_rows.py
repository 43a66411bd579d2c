# SPDX-License-Identifier: Apache-2.0
"""Rows of a layer that are to be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass(frozen=True)
class WantedRows:
    """Rows of a layer, and where each of them goes.

    Parameters
    ----------
    layer
        Whose.
    rows
        int64 row numbers, each once.
    out
        uint8 of shape (any, row_bytes).
    places
        int64, where in `out` each row goes.
    """

    layer: int
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    places: NDArray[np.int64]

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each row, int64."""
        return self.rows // GROUP_TOKENS

    def only(self, chosen: NDArray[np.bool_], first_row: int = 0) -> WantedRows:
        """Return some of them, numbered from `first_row` on, by one flag for each row."""
        rows = self.rows[chosen]
        return WantedRows(self.layer, rows - first_row, self.out, self.places[chosen])

    def pieces(self, most: int) -> Iterator[WantedRows]:
        """Yield all of them, at most so many at a time."""
        for begin in range(0, len(self.rows), most):
            part = slice(begin, begin + most)
            yield WantedRows(self.layer, self.rows[part], self.out, self.places[part])
