# SPDX-License-Identifier: Apache-2.0
"""Selected sets as the native library sees them, and the rows that at least one of them has."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.structures import SelectedSets


class SelectedRows:
    """Sets that the library chooses or is given, call after call in the same memory.

    One set for the layer, or one per KV head. What is counted, looked for, read and promoted is a
    row, whichever sets have it. Every layer and step looks at `table` and `sets` as they are: calls
    would take longer than what they do.

    Parameters
    ----------
    sets
        How many.
    positions
        Most positions of a set.
    tokens
        Most tokens that they are of.

    Attributes
    ----------
    table, address
        What the library is told, and where that lies.
    sets
        int64, one set behind the other, ascending in each; `table.set_rows` are in each.
    most_rows
        Most rows of all sets together.
    """

    def __init__(self, sets: int, positions: int, tokens: int) -> None:
        self.most_rows = min(sets * positions, tokens)
        self.sets = np.empty(sets * positions, np.int64)
        self._positions = self.sets
        self._numbers: NDArray[np.int32] | None = None
        if sets > 1:
            self._positions = np.empty(self.most_rows, np.int64)
            self._numbers = np.empty(sets * positions, np.int32)
        self._addresses = np.empty(self.most_rows, np.uint64)
        self.table = SelectedSets(
            set_count=sets,
            sets=self.sets.ctypes.data,
            positions=self._positions.ctypes.data,
            numbers=None if self._numbers is None else self._numbers.ctypes.data,
            addresses=self._addresses.ctypes.data,
        )
        self.address = ctypes.addressof(self.table)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.table.count)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions of all rows, int64, ascending, valid until others come."""
        return self._positions[: self.table.count]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where the rows lie, uint64, 0 for one that is not in memory; valid as long."""
        return self._addresses[: self.table.count]
