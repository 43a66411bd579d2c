# SPDX-License-Identifier: Apache-2.0
"""Checksums of everything that lies on the drive, kept in memory."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.system.growing_tables import GrowingTable

ROW_SUM_BYTES = 4


class RowSums:
    """A checksum of every row of the cold pool; any thread may use it."""

    def __init__(self, layers: int, accountant: Accountant) -> None:
        self._accountant = accountant
        self._tables: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32) for _ in range(layers)]
        self._memory = [GrowingTable(np.uint32) for _ in range(layers)]
        self._covered_rows = 0
        # While a table moves nobody writes to the old one.
        self._changing = threading.Lock()

    def cover(self, rows: int) -> None:
        """Make room in all tables for row numbers below `rows`.

        Raises
        ------
        BudgetError
            Where the tables do not fit.
        MemoryError
            Where the system has no memory for them; none is counted then.
        """
        if rows <= self._covered_rows:
            return
        grown = round_up(rows, TABLE_GROWTH_ROWS)
        # While one of them moves the old one is there as well.
        twice = max(
            (own.moving_bytes(self._covered_rows, grown) for own in self._memory), default=0
        )
        added = (grown - self._covered_rows) * ROW_SUM_BYTES * len(self._tables)
        with self._accountant.taking(Part.OTHER, added, twice):
            try:
                for layer, own in enumerate(self._memory):
                    with self._changing:
                        self._tables[layer] = own.grown(self._tables[layer], grown)
            except BaseException:
                for layer, own in enumerate(self._memory):
                    with self._changing:
                        self._tables[layer] = own.cut(self._tables[layer], self._covered_rows)
                raise
        self._covered_rows = grown

    def note(self, layer: int, rows: NDArray[np.int64], memory: NDArray[np.uint8]) -> None:
        """Take the sums of rows that are about to be written.

        Parameters
        ----------
        layer, rows
            Whose, and their numbers, int64.
        memory
            uint8 of shape (rows, row_bytes), contiguous.
        """
        self.take(layer, rows, sums_of(memory, np.arange(len(rows))))

    def take(self, layer: int, rows: NDArray[np.int64] | slice, sums: NDArray[np.uint32]) -> None:
        """Take the sums of rows, uint32, from who knows them; there is room for them (`cover`)."""
        with self._changing:
            self._tables[layer][rows] = sums

    def expected(self, layer: int) -> NDArray[np.uint32] | None:
        """Return what the sums of a layer's rows should be, None where nobody looks.

        Of rows that nobody writes now; those of others may change.
        """
        return self._tables[layer]

    def noted(self, layer: int, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the sums of rows, uint32, a copy."""
        with self._changing:
            return self._tables[layer][rows]

    def wrong_row(
        self,
        layer: int,
        rows: NDArray[np.int64],
        memory: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> int | None:
        """Return the number of a row that is not as it was written, None where all are.

        Parameters
        ----------
        layer, rows
            Whose, and their numbers, int64.
        memory
            uint8 of shape (any, row_bytes), contiguous.
        places
            int64: where in it each row was read to.
        """
        differs = sums_of(memory, places) != self._tables[layer][rows]
        return int(rows[differs.argmax()]) if differs.any() else None


class RowStream:
    """Looks at rows that come as one stretch of bytes, in pieces of any size.

    Parameters
    ----------
    layer, first_row
        Whose, and the number of the first one.
    """

    def __init__(self, sums: RowSums, layer: int, first_row: int, row_bytes: int) -> None:
        self._sums = sums
        self._layer = layer
        self._next = first_row
        self._row_bytes = row_bytes
        self._begun = np.zeros(0, np.uint8)

    def wrong_row(self, piece: memoryview) -> int | None:
        """Return the number of a row that ends in a piece and is wrong, None where none is."""
        data: NDArray[np.uint8] = np.frombuffer(piece, np.uint8)
        found = None
        if len(self._begun):
            missing = self._row_bytes - len(self._begun)
            self._begun = np.concatenate([self._begun, data[:missing]])
            data = data[missing:]
            if len(self._begun) < self._row_bytes:
                return None
            found = self._look(self._begun)
        whole = len(data) // self._row_bytes * self._row_bytes
        # A copy: the piece is not there any more when the next one comes.
        self._begun = data[whole:].copy()
        return self._look(data[:whole]) if found is None else found

    def _look(self, data: NDArray[np.uint8]) -> int | None:
        memory = data.reshape(-1, self._row_bytes)
        rows = np.arange(self._next, self._next + len(memory))
        self._next += len(memory)
        return self._sums.wrong_row(self._layer, rows, memory, np.arange(len(memory)))


def sums_of(memory: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the checksums of rows, the same ones for the same bytes while this process lives.

    Parameters
    ----------
    memory
        uint8 of shape (any, row_bytes), contiguous, row_bytes a multiple of 64.
    places
        int64: which of its rows.
    """
    sums = np.empty(len(places), np.uint32)
    native_library().row_sums(memory, np.ascontiguousarray(places, np.int64), sums)
    return sums
