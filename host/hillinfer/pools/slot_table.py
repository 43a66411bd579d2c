# SPDX-License-Identifier: Apache-2.0
"""What is known of the row in each slot of a hot pool."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import PAGE_BYTES, private_memory, round_up

NOWHERE = -1
# Row number, position, step of the last selection, length of its sequence, hits.
SLOT_BYTES = 8 + 4 + 4 + 4 + 2
_MOVED_AT_ONCE = 64


class SlotTable:
    """Columns with an entry per slot; memory is taken as slots are used.

    Parameters
    ----------
    slots
        Entries that address space is reserved for.
    row_bytes
        Bytes of a row.

    Attributes
    ----------
    data
        uint8 of shape (slots, row_bytes): the rows themselves.
    rows
        int64: row numbers, -1 where a slot is free.
    positions, last_selected, lengths, counts
        int32, int32, int32, uint16: what `RowHistory` holds.
    """

    def __init__(self, slots: int, row_bytes: int) -> None:
        self._item_bytes = (row_bytes, 8, 4, 4, 4, 2)
        self._arenas = [private_memory(slots * size) for size in self._item_bytes]
        data, rows, positions, last_selected, lengths, counts = self._arenas
        self.data: NDArray[np.uint8] = np.frombuffer(data, np.uint8, slots * row_bytes).reshape(
            slots, row_bytes
        )
        self.rows: NDArray[np.int64] = np.frombuffer(rows, np.int64, slots)
        self.positions: NDArray[np.int32] = np.frombuffer(positions, np.int32, slots)
        self.last_selected: NDArray[np.int32] = np.frombuffer(last_selected, np.int32, slots)
        self.lengths: NDArray[np.int32] = np.frombuffer(lengths, np.int32, slots)
        self.counts: NDArray[np.uint16] = np.frombuffer(counts, np.uint16, slots)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy entries from some slots to others, none of them both."""
        columns = (self.data, self.rows, self.positions, self.last_selected, self.lengths)
        # In pieces: what is moved is in memory twice meanwhile, when memory is short.
        for start in range(0, len(sources), _MOVED_AT_ONCE):
            piece = slice(start, start + _MOVED_AT_ONCE)
            for column in (*columns, self.counts):
                column[targets[piece]] = column[sources[piece]]

    def give_back(self, first_slot: int) -> None:
        """Give the memory of all slots from `first_slot` on back; they read as zeros then."""
        for arena, size in zip(self._arenas, self._item_bytes, strict=True):
            first_page = round_up(first_slot * size, PAGE_BYTES)
            if first_page < len(arena):
                arena.madvise(mmap.MADV_DONTNEED, first_page, len(arena) - first_page)
