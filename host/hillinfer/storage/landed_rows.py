# SPDX-License-Identifier: Apache-2.0
"""Cold rows of one selection that are read before attention asks for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.read_cost import ReadCost


@dataclass(frozen=True, eq=False)
class LandedRows:
    """Which rows land where.

    Parameters
    ----------
    positions
        int64, ascending: a part of the selection.
    places
        int64, of the same length: rows of the landing area.
    blocks
        Blocks of the landing area that hold them.
    reading
        What reading them took, once they are there, or what went wrong; the blocks are ready then,
        or free again.
    """

    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    blocks: list[int]
    reading: Future[ReadCost]

    def among(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of some positions, int64, each once, whether its row landed."""
        return np.isin(positions, self.positions, assume_unique=True)

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of rows that landed, by position."""
        return self.places[np.searchsorted(self.positions, positions)]
