# SPDX-License-Identifier: Apache-2.0
"""Selected sets as the native library sees them, and the rows that at least one of them has."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.structures import SelectedSets


class SelectedRows:
    """Sets that are chosen or given, call after call in the same memory.

    One set for the layer, or one per KV head. What is counted, looked for, read and promoted is a
    row, whichever sets have it.

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
    address
        What the library is told.
    most_rows
        Most rows of all sets together.
    """

    def __init__(self, sets: int, positions: int, tokens: int) -> None:
        self._room, self._tokens = positions, tokens
        self.most_rows = min(sets * positions, tokens)
        self._sets = np.empty(sets * positions, np.int64)
        self._positions = self._sets
        self._numbers: NDArray[np.int32] | None = None
        if sets > 1:
            self._positions = np.empty(self.most_rows, np.int64)
            self._numbers = np.empty(sets * positions, np.int32)
        self._addresses = np.empty(self.most_rows, np.uint64)
        self._table = SelectedSets(
            set_count=sets,
            sets=self._sets.ctypes.data,
            positions=self._positions.ctypes.data,
            numbers=None if self._numbers is None else self._numbers.ctypes.data,
            addresses=self._addresses.ctypes.data,
        )
        self.address = ctypes.addressof(self._table)

    def has_room(self, positions: int, tokens: int) -> bool:
        """Say whether sets of so many positions, of so many tokens, go in."""
        return positions <= self._room and tokens <= self._tokens

    def tell(self, sets: Sequence[NDArray[np.int64]]) -> None:
        """Take sets that others have chosen: as many as these, int64, of equal length, ascending.

        `rows` and `addresses` follow once the library is asked.
        """
        count = self._table.set_rows = len(sets[0])
        np.concatenate(sets, out=self._sets[: len(sets) * count])

    @property
    def sets(self) -> list[NDArray[np.int64]]:
        """The sets, int64, valid until others come."""
        count = self._table.set_rows
        return list(self._sets[: self._table.set_count * count].reshape(-1, count))

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self._table.count)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions of all rows, int64, ascending, valid until others come."""
        return self._positions[: self._table.count]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where the rows lie, uint64, 0 for one that is not in memory; valid as long."""
        return self._addresses[: self._table.count]
