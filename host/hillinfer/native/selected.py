# SPDX-License-Identifier: Apache-2.0
"""Selected sets as the native library sees them: their rows, what is missing, what comes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library
from hillinfer.native.signatures import Awaited
from hillinfer.native.structures import Attending, Misses, SelectedSets, address_of, row_addresses

# --- Sets and the rows that at least one of them has ---


class SelectedRows:
    """Sets that the library chooses or is given, call after call in the same memory.

    One set for the layer, or one per KV head, of at most `positions` each and of `tokens` in all.
    What is counted, looked for, read and promoted is a row, whichever sets have it. Every layer and
    step looks at `table` and `sets` as they are: calls would take longer than what they do.

    `table` is what the library is told, and `address` where that lies. `sets` is int64, one set
    behind the other, ascending in each; `table.set_rows` are in each. `most_rows` all sets have
    together, and `byte_count` is what all this memory takes.
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
        self.byte_count = self.sets.nbytes + self._addresses.nbytes
        if self._numbers is not None:
            self.byte_count += self._positions.nbytes + self._numbers.nbytes
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


def selected_bytes(sets: int, positions: int, tokens: int) -> int:
    """Return what memory for selected sets takes; parameters as of `SelectedRows`."""
    rows, listed = min(sets * positions, tokens), sets * positions
    return 8 * (listed + rows) + (8 * rows + 4 * listed if sets > 1 else 0)


# --- What is missing of a selection ---

# Of a row: its number, row number and place, its position and its hits.
MISS_BYTES = 3 * 8 + 4 + 2


@dataclass(frozen=True)
class MissedRows:
    """Some rows that were not in memory; all arrays have the shape (rows,).

    Parameters
    ----------
    numbers
        int64, ascending: which of the selection they are.
    rows
        int64, their row numbers.
    places
        int64, where they were read to; of those that were not, how many of these come before.
    positions
        int32, logical positions.
    hits
        uint16, from the hit-rate table.
    """

    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    positions: NDArray[np.int32]
    hits: NDArray[np.uint16]


class MissList:
    """What the library lists of a selection, of at most `room` rows, in the same memory each call.

    `address` is what the library is told, and `byte_count` what all this memory takes.
    """

    def __init__(self, room: int) -> None:
        self._numbers, self._rows, self._places = numbers = np.empty((3, room), np.int64)
        self._positions, self._hits = np.empty(room, np.int32), np.empty(room, np.uint16)
        self.byte_count = numbers.nbytes + self._positions.nbytes + self._hits.nbytes
        self._table = Misses(
            numbers=self._numbers.ctypes.data,
            rows=self._rows.ctypes.data,
            places=self._places.ctypes.data,
            positions=self._positions.ctypes.data,
            hits=self._hits.ctypes.data,
        )
        self.address = ctypes.addressof(self._table)
        self._kept: tuple[NDArray[np.int64], NDArray[np.int64], Awaited | None] | None = None

    def tell_landed(
        self,
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        memory: NDArray[np.uint8],
        coming: Awaited | None = None,
    ) -> None:
        """Say what was read ahead, until `forget_landed`.

        Positions are int64, ascending; places int64, which rows they are of `memory`, uint8 (any,
        row_bytes), contiguous. `coming` is who brings it and is to be waited for; None where it is
        there.
        """
        table, self._kept = self._table, (positions, places, coming)
        table.coming = None if coming is None else ctypes.addressof(coming)
        table.landed_positions, table.landed_places = address_of(positions), address_of(places)
        table.landed_count, table.landed = len(positions), address_of(memory)

    def forget_landed(self) -> None:
        """Know of nothing that was read ahead."""
        self._table.landed_count, self._table.coming, self._kept = 0, None, None

    @property
    def waited_ns(self) -> int:
        """How long the library has waited for what was read ahead, where it has."""
        coming = self._kept[2] if self._kept is not None else None
        return 0 if coming is None else int(coming.nanoseconds)

    @property
    def is_looked_for(self) -> bool:
        """Whether the last call has looked for rows: what it was to wait for came whole."""
        coming = self._kept[2] if self._kept is not None else None
        return coming is None or bool(coming.is_whole)

    @property
    def arrived(self) -> int:
        """How many were read ahead; they come first."""
        return int(self._table.arrived)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._table.count)

    def recount(self, counts: NDArray[np.uint16]) -> None:
        """Look hits up again, in a layer's hit-rate table that changed since they were listed."""
        own = slice(0, self.count)
        self._hits[own] = counts[self._positions[own]]

    def part(self, start: int, stop: int) -> MissedRows:
        """Return some of them, which stay when the list is used again."""
        own = slice(start, stop)
        return MissedRows(
            self._numbers[own].copy(),
            self._rows[own].copy(),
            self._places[own].copy(),
            self._positions[own].copy(),
            self._hits[own].copy(),
        )


# --- What comes ---

_LINE_BYTES = 64


class ComingAttention:
    """Attention to selected sets, run by run, while rows of a run come.

    `variant` is the number of the instruction set, `state_bytes` what
    `NativeLibrary.attention_bytes` says for the shape, and `table` what the library is told of a
    run.
    """

    def __init__(self, variant: int, state_bytes: int, row_bytes: int) -> None:
        self._library = native_library()
        self._memory = np.empty(state_bytes + _LINE_BYTES, np.uint8)
        address = self._memory.ctypes.data
        # Vectors that cross no line load faster.
        self.table = Attending(state=address + -address % _LINE_BYTES, variant=variant)
        self._kept_bytes = (self._library.tile_rows - 1) * row_bytes
        self._kept: NDArray[np.uint8] | None = None
        self._selected = SelectedRows(1, 0, 0)
        self._out = 0

    def begin(self, step: int, selected: SelectedRows, out: int) -> None:
        """Begin with the first run.

        `step` is the address of what a decode step is asked for, `out` that of float32
        (query_heads, head_dim), which get the output. Where rows of the sets lie, 0 for those that
        come, may follow until the first run.
        """
        table, self._selected, self._out = self.table, selected, out
        table.step, table.is_begun, table.nanoseconds = step, 0, 0
        table.selected, table.kept, self._kept = selected.address, None, None

    @property
    def rows(self) -> int:
        """How many rows the sets have."""
        return self._selected.count

    def run(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Go on with a run of the rows, and return its addresses.

        Where there is one set runs are multiples of the library's tile, but for the last.
        """
        table, is_last = self.table, stop == self.rows
        if not is_last and self._kept is None:
            # What several sets have of open tiles. As much as copies of rows take on other ways to
            # attend, which are counted and not made on this one.
            self._kept = np.empty(self._kept_bytes, np.uint8)
            table.kept = self._kept.ctypes.data
        table.start, table.count, table.is_done = start, stop - start, 0
        table.out = self._out if is_last else None
        return self._selected.addresses[start:stop]

    def end(self) -> None:
        """Attend to what is left of a run whose rows are all here."""
        if not self.table.is_done:
            self._library.call("hillinfer_attend_run", self.table)
        if self.table.out:
            self.table.kept = self._kept = None

    @property
    def seconds(self) -> float:
        """What attention took since `begin`."""
        return float(self.table.nanoseconds) / 1e9


@dataclass(frozen=True)
class Coming:
    """Rows that a run of attention waits for.

    `addresses`, uint64, are those of the run, which get theirs; `numbers`, int64 and contiguous,
    say which of them each row is.
    """

    run: ComingAttention
    addresses: NDArray[np.uint64]
    numbers: NDArray[np.int64]

    def only(self, chosen: NDArray[np.bool_]) -> Coming:
        """Return some of the rows, by one flag for each."""
        return Coming(self.run, self.addresses, self.numbers[chosen])

    def come(self, memory: NDArray[np.uint8], places: NDArray[np.int64]) -> None:
        """Say where all of them lie: places of uint8 memory (any, row_bytes)."""
        self.addresses[self.numbers] = row_addresses(memory, places)
