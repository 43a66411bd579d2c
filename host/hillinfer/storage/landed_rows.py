# SPDX-License-Identifier: Apache-2.0
"""Cold rows of one selection that are read before attention asks for them."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.read_cost import ReadCost


class LandedRows:
    """Which rows land where; grows in the order of positions while they are read.

    Parameters
    ----------
    reading
        What reading them took, once no more is read ahead, or what went wrong. The others may look
        at rows then; the one that reads adds them before.

    Attributes
    ----------
    blocks
        Blocks of the landing area that hold them.
    is_wanted
        Attention waits: what has no room yet is not waited for.
    """

    def __init__(self, reading: Future[ReadCost]) -> None:
        self.reading = reading
        self.blocks: list[int] = []
        self.is_wanted = False
        self._positions = self._places = np.zeros(0, np.int64)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of the rows, int64, ascending: a part of the selection."""
        return self._positions

    @property
    def places(self) -> NDArray[np.int64]:
        """Where each of them lies, int64: rows of the landing area."""
        return self._places

    def add(
        self, blocks: list[int], positions: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Take over blocks that are filled.

        Parameters
        ----------
        blocks
            Of the landing area.
        positions
            int64, ascending, behind all that were added before.
        places
            int64, of the same length.
        """
        self.blocks += blocks
        self._positions = np.concatenate([self._positions, positions])
        self._places = np.concatenate([self._places, places])

    def among(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of some positions, int64, each once, whether its row landed."""
        return np.isin(positions, self._positions, assume_unique=True)

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of rows that landed, by position."""
        return self._places[np.searchsorted(self._positions, positions)]
