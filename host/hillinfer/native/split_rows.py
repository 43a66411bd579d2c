# SPDX-License-Identifier: Apache-2.0
"""Selected sets whose tokens are exact or coded, as the native library sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.coded import SplitSelection
from hillinfer.native.coming import MissList
from hillinfer.native.selected_rows import SelectedRows

Positions = NDArray[np.int64]

# The number of a segment's values, and the addresses of c and M.
_VALUE_BYTES = 3 * 8
# What is said of each coded token, or row to be read: eight bytes each.
_COLUMNS = 7


class SplitRows:
    """Sets that the library chooses or is given, call after call in the same memory.

    Parameters
    ----------
    sets
        How many: one for the layer, or one per KV head.
    positions, exact
        Most positions of a set, and most of them that are exact.
    tokens
        Most tokens that they are of.
    row_bytes
        Of a token's codes and exponents.

    Attributes
    ----------
    table, address
        What the library is told, and where that lies.
    exact, coded
        The exact tokens of the sets and their rows, and the coded ones.
    misses
        Exact rows that were not in memory.
    """

    def __init__(self, sets: int, positions: int, exact: int, tokens: int, row_bytes: int) -> None:
        self._room = positions, exact, tokens
        self._sets = np.empty(sets * positions, np.int64)
        self.exact = SelectedRows(sets, exact, tokens)
        self.coded = SelectedRows(sets, positions, tokens)
        self.misses = MissList(self.exact.most_rows)
        memory = np.empty((_COLUMNS, min(tokens, sets * positions)), np.int64)
        (rows, missing, numbers, sources, *cold) = memory
        self._missing, self._cold, self._numbers = missing, cold, numbers
        self._weighed: object = None
        self.table = SplitSelection(
            sets=self._sets.ctypes.data,
            exact=self.exact.address,
            coded=self.coded.address,
            row_bytes=row_bytes,
            rows=rows.ctypes.data,
            missing=missing.ctypes.data,
            numbers=numbers.ctypes.data,
            sources=sources.ctypes.data,
            cold_positions=cold[0].ctypes.data,
            cold_rows=cold[1].ctypes.data,
            cold_numbers=cold[2].ctypes.data,
        )
        self.address = ctypes.addressof(self.table)

    def holds(self, positions: int, exact: int, tokens: int) -> bool:
        """Say whether there is room for so many."""
        room = self._room
        return positions <= room[0] and exact <= room[1] and tokens <= room[2]

    def tell(self, sets: Sequence[Positions], exact: Sequence[Positions]) -> None:
        """Say what is selected, int64 positions, ascending, as many in each set."""
        count, best = len(sets[0]), len(exact[0])
        self.table.set_rows, self.exact.table.set_rows = count, best
        np.concatenate(sets, out=self._sets[: len(sets) * count])
        np.concatenate(exact, out=self.exact.sets[: len(sets) * best])

    def tell_values(self, words: bytes) -> None:
        """Say what is known of segments' values, three words of each from the first one on."""
        self.table.segments, self.table.segment_count = words, len(words) // _VALUE_BYTES

    def tell_weights(
        self, weighed: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]] | None
    ) -> None:
        """Give L' of each set's coded tokens, and which keys are invalid; None to have them made.

        Int32 (query_heads, tokens) and bool (kv_heads, tokens), C-contiguous.
        """
        table = self.table
        if weighed is None:
            table.aligned = table.invalid = self._weighed = None
            return
        words = np.array([[one.ctypes.data for one in both] for both in weighed], np.int64).T.copy()
        self._weighed = weighed, words
        table.aligned, table.invalid = words[0].ctypes.data, words[1].ctypes.data

    @property
    def sets(self) -> list[Positions]:
        """The sets, which stay when others come."""
        return _parts(self._sets, self.exact.table.set_count, self.table.set_rows)

    @property
    def exact_sets(self) -> list[Positions]:
        """The exact tokens of each, likewise."""
        table = self.exact.table
        return _parts(self.exact.sets, table.set_count, table.set_rows)

    @property
    def coded_sets(self) -> list[Positions]:
        """The coded ones likewise, once the library has told them."""
        table = self.coded.table
        return _parts(self.coded.sets, table.set_count, table.set_rows)

    @property
    def missing_count(self) -> int:
        """How many coded tokens had no codes."""
        return int(self.table.missing_count)

    @property
    def cold_count(self) -> int:
        """How many rows are to be read: of coded tokens alone, of what is attended to."""
        return int(self.table.cold_count)

    @property
    def cold(self) -> tuple[Positions, Positions]:
        """Their positions and numbers, int64, which stay when others come."""
        count = self.table.cold_count
        return self._cold[0][:count].copy(), self._cold[1][:count].copy()

    @property
    def cold_numbers(self) -> Positions:
        """Of a choice ahead, numbers of the tokens' values, `NO_NUMBER` of exact ones; a copy.

        Of what is attended to, which of the tokens without codes they are.
        """
        return self._cold[2][: self.table.cold_count].copy()

    @property
    def missing_numbers(self) -> Positions:
        """Of tokens without codes, the numbers of their segments' values."""
        return self._numbers[: self.table.missing_count]

    def keep_cold(self, chosen: NDArray[np.bool_]) -> None:
        """Leave only these of the rows that are to be read."""
        (own,) = np.nonzero(chosen)
        gone = len(chosen) - len(own)
        for column in self._cold:
            column[: len(own)] = column[own]
        self.table.cold_count = len(own)
        self.table.read_count -= gone


def _parts(memory: Positions, sets: int, rows: int) -> list[Positions]:
    return list(memory[: sets * rows].copy().reshape(sets, rows))
