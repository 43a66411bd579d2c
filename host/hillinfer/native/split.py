# SPDX-License-Identifier: Apache-2.0
"""Sets whose tokens are exact or coded, as the native library sees them, and memory for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.memory_budget import Accountant, Part
from hillinfer.native.selected import MISS_BYTES, MissList, SelectedRows, selected_bytes
from hillinfer.native.signatures import SplitSelection
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- Sets whose tokens are exact or coded ---

Positions = NDArray[np.int64]

# The number of a segment's values, and the addresses of c and M.
_VALUE_BYTES = 3 * 8
# What is said of each coded token, or row to be read: eight bytes each.
_COLUMNS = 7
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class ColdTokens:
    """Coded tokens that DRAM has no codes of, int64 each.

    Parameters
    ----------
    positions, rows
        Which they are, and their row numbers.
    numbers
        Which of the tokens without codes.
    """

    positions: Positions
    rows: Positions
    numbers: Positions

    def only(self, chosen: NDArray[np.bool_]) -> ColdTokens:
        """Return some of them, by one flag for each token."""
        return ColdTokens(self.positions[chosen], self.rows[chosen], self.numbers[chosen])


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
    room
        Most positions of a set, most of them that are exact, and most tokens that they are of.
    exact, coded
        The exact tokens of the sets and their rows, and the coded ones.
    misses, byte_count
        Exact rows that were not in memory, and what all this memory takes.
    """

    def __init__(self, sets: int, positions: int, exact: int, tokens: int, row_bytes: int) -> None:
        self.room = positions, exact, tokens
        self._sets = np.empty(sets * positions, np.int64)
        self.exact = SelectedRows(sets, exact, tokens)
        self.coded = SelectedRows(sets, positions, tokens)
        self.misses = MissList(self.exact.most_rows)
        memory = np.empty((_COLUMNS, min(tokens, sets * positions)), np.int64)
        (rows, missing, numbers, sources, *cold) = memory
        self._missing, self._cold, self._numbers = missing, cold, numbers
        parts = self.exact, self.coded, self.misses
        self.byte_count = self._sets.nbytes + memory.nbytes + sum(one.byte_count for one in parts)
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
        room = self.room
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
    def in_place(self) -> tuple[list[Positions], list[Positions]]:
        """The sets and the exact tokens of each, valid until others come."""
        exact, own = self.exact.table, self.exact.sets
        count, rows, best = exact.set_count, self.table.set_rows, exact.set_rows
        sets = self._sets[: count * rows].reshape(count, rows)
        return list(sets), list(own[: count * best].reshape(count, best))

    @property
    def sets(self) -> list[Positions]:
        """The sets, which stay when others come."""
        return [one.copy() for one in self.in_place[0]]

    @property
    def exact_sets(self) -> list[Positions]:
        """The exact tokens of each, likewise."""
        return [one.copy() for one in self.in_place[1]]

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

    def tell_codes(self, missing: Positions, places: NDArray[np.uint64]) -> None:
        """Say where codes lie that came, by which of the tokens without codes they are."""
        self.coded.addresses[self._missing[missing]] = places

    def set_all_aside(self) -> ColdTokens:
        """Leave all rows that are to be read out of them, and return them."""
        count = int(self.table.cold_count)
        aside = ColdTokens(*(column[:count].copy() for column in self._cold))
        self.table.cold_count = 0
        self.table.read_count -= count
        return aside

    def set_aside(self, chosen: NDArray[np.bool_]) -> ColdTokens:
        """Leave those of the rows that are to be read out of them, and return them."""
        count, (own,) = self.table.cold_count, np.nonzero(~chosen)
        aside = ColdTokens(*(column[:count][chosen] for column in self._cold))
        for column in self._cold:
            column[: len(own)] = column[own]
        self.table.cold_count = len(own)
        self.table.read_count -= len(aside.rows)
        return aside

    def take_back(self, aside: ColdTokens) -> None:
        """Have these, of those that were set aside, read instead of the rows before."""
        count = len(aside.rows)
        given = aside.positions, aside.rows, aside.numbers
        for column, own in zip(self._cold, given, strict=True):
            column[:count] = own
        self.table.cold_count = count
        self.table.read_count += count


# --- Memory that is used again ---


def split_bytes(sets: int, positions: int, exact: int, tokens: int) -> int:
    """Return what memory for sets takes; parameters as of `SplitRows`."""
    rows = min(tokens, sets * positions)
    both = selected_bytes(sets, positions, tokens) + selected_bytes(sets, exact, tokens)
    own = (sets * positions + _COLUMNS * rows) * _ENTRY_BYTES
    return own + both + min(tokens, sets * exact) * MISS_BYTES


class ReusedRows:
    """Rows of memory for one step of one layer, counted when they grow."""

    def __init__(self, row_bytes: int, accountant: Accountant) -> None:
        self._row_bytes = row_bytes
        self._accountant = accountant
        self._memory = np.zeros((0, row_bytes), np.uint8)

    def take(self, rows: int) -> NDArray[np.uint8]:
        """Return so many rows, valid until the next are taken."""
        if rows > len(self._memory):
            more = (rows - len(self._memory)) * self._row_bytes
            with self._accountant.taking(Part.STAGING, more):
                self._memory = np.zeros((rows, self._row_bytes), np.uint8)
        return self._memory[:rows]


class CountedMemory:
    """Counts memory that each step of a layer makes anew, by the tokens that it is made for."""

    def __init__(self, token_bytes: int, accountant: Accountant) -> None:
        self._token_bytes = token_bytes
        self._accountant = accountant
        self._tokens = 0

    def expect(self, tokens: int) -> None:
        """Count what a step of so many tokens makes, where none had as many."""
        more = max(0, tokens - self._tokens)
        if more:
            self._accountant.take(Part.STAGING, more * self._token_bytes)
            self._tokens += more


class SelectedRoom:
    """Memory that the library chooses exact rows in, for one sequence of a step; as `SplitRoom`.

    Parameters
    ----------
    sets
        How many are chosen.
    accountant
        Counts them.
    """

    def __init__(self, sets: int, accountant: Accountant) -> None:
        self._sets, self._room = sets, (0, 0)
        self._counted = CountedMemory(1, accountant)
        self._rows, self._misses = SelectedRows(sets, 0, 0), MissList(0)

    def take(self, count: int, tokens: int) -> tuple[SelectedRows, MissList]:
        """Return room for sets of so many positions, of so many tokens."""
        if count > self._room[0] or tokens > self._room[1]:
            # Each token makes it a little more.
            room = with_more(count), with_more(tokens)
            rows = SelectedRows(self._sets, *room)
            misses = MissList(rows.most_rows)
            self._counted.expect(rows.byte_count + misses.byte_count)
            self._room, self._rows, self._misses = room, rows, misses
        return self._rows, self._misses


class SplitRoom:
    """Memory that the library chooses in, for one sequence of a step, counted when it grows.

    Parameters
    ----------
    sets
        How many are chosen.
    code_bytes, weight_bytes
        Of a token's codes, and of what weighs it.
    accountant
        Counts them.
    """

    def __init__(
        self, sets: int, code_bytes: int, weight_bytes: int, accountant: Accountant
    ) -> None:
        self._sets, self._code_bytes = sets, code_bytes
        self._arrived = ReusedRows(code_bytes, accountant)
        self._weights = CountedMemory(weight_bytes, accountant)
        self._counted = CountedMemory(1, accountant)
        self.split = SplitRows(sets, 0, 0, 0, code_bytes)

    def take(self, count: int, exact: int, tokens: int) -> SplitRows:
        """Return room for sets of so many positions, so many of them exact, of so many tokens."""
        if not self.split.holds(count, exact, tokens):
            # Each token makes it a little more.
            room = with_more(count), with_more(exact), with_more(tokens)
            split = SplitRows(self._sets, *room, self._code_bytes)
            self._counted.expect(split.byte_count)
            self.split = split
        coded = self._sets * (count - exact)
        self._weights.expect(coded)
        self._codes = self._arrived.take(min(coded, tokens))
        self.split.table.arrived = self._codes.ctypes.data
        self.split.tell_weights(None)
        return self.split


def with_more(count: int) -> int:
    """Return room for a count that grows by little each step."""
    return count + count // 8 + GROUP_TOKENS
