# SPDX-License-Identifier: Apache-2.0
"""Copies of rows in DRAM, for one layer."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.storage.aligned_buffer import PAGE_BYTES, private_memory, round_up

# What the two tables take for each slot, beside its row.
SLOT_BYTES = 12
_NOWHERE = -1


class HotPool:
    """The hot pool of one layer: slots of rows, found by their row number (HillInfer, BKP).

    A row is on the drive whether it is hot or not, so demoting one writes nothing.

    Parameters
    ----------
    row_bytes
        Bytes of a row.
    most_rows
        Slots that address space is reserved for; memory is taken as slots are used.
    policy
        Chooses whom to demote.
    """

    def __init__(self, row_bytes: int, most_rows: int, policy: PoolPolicy) -> None:
        self._row_bytes = row_bytes
        self._arenas = [private_memory(most_rows * size) for size in (row_bytes, 8, 4)]
        self._item_bytes = (row_bytes, 8, 4)
        self._rows = np.frombuffer(self._arenas[0], np.uint8, most_rows * row_bytes).reshape(
            most_rows, row_bytes
        )
        self._row_of_slot = np.frombuffer(self._arenas[1], np.int64, most_rows)
        self._last_used = np.frombuffer(self._arenas[2], np.int32, most_rows)
        self._policy = policy
        self._slot_of_row = np.full(0, _NOWHERE, np.int32)
        self._used = 0

    @property
    def used_rows(self) -> int:
        """Slots that hold, or have held, a row: the memory this pool takes."""
        return self._used

    def cover(self, rows: int) -> None:
        """Make room in the table for row numbers below `rows`."""
        if rows > len(self._slot_of_row):
            grown = np.full(rows, _NOWHERE, np.int32)
            grown[: len(self._slot_of_row)] = self._slot_of_row
            self._slot_of_row = grown

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each row, -1 where it is not hot."""
        return self._slot_of_row[rows]

    def copy_out(
        self, slots: NDArray[np.int32], out: NDArray[np.uint8], places: NDArray[np.int64]
    ) -> None:
        """Copy rows from slots to places of `out`, uint8 of shape (any, row_bytes)."""
        out[places] = self._rows[slots]

    def touch(self, slots: NDArray[np.int32], step: int) -> None:
        """Note that these slots were selected in this step."""
        self._last_used[slots] = step

    def admit(
        self, rows: NDArray[np.int64], source: NDArray[np.uint8], step: int, capacity: int
    ) -> None:
        """Promote rows, demoting as many as do not fit; rows used in this step stay.

        Parameters
        ----------
        rows
            int64 row numbers, none of them hot; where they are too many, the last ones stay out.
        source
            uint8 of shape (rows, row_bytes).
        step
            The current step.
        capacity
            Slots this pool may use now.
        """
        capacity = min(capacity, len(self._rows))
        free = np.flatnonzero(self._row_of_slot[: min(self._used, capacity)] == _NOWHERE)
        grown = np.arange(self._used, min(max(self._used, capacity), self._used + len(rows)))
        slots = np.concatenate([free, grown])[: len(rows)]
        if len(slots) < len(rows):
            settled = np.flatnonzero(self._row_of_slot[: min(self._used, capacity)] != _NOWHERE)
            idle = settled[self._last_used[settled] < step]
            wanted = min(len(rows) - len(slots), len(idle))
            slots = np.concatenate(
                [slots, idle[self._policy.victims(self._last_used[idle], wanted)]]
            )
        rows, source = rows[: len(slots)], source[: len(slots)]
        used = max(self._used, int(slots.max(initial=-1)) + 1)
        self._row_of_slot[self._used : used] = _NOWHERE
        self._used = used
        self._leave(slots)
        self._rows[slots] = source
        self._row_of_slot[slots] = rows
        self._slot_of_row[rows] = slots
        self._last_used[slots] = step

    def shrink(self, capacity: int) -> None:
        """Demote the rows of all slots from `capacity` on and give their memory back."""
        if capacity >= self._used:
            return
        self._leave(np.arange(capacity, self._used))
        self._used = capacity
        for arena, size in zip(self._arenas, self._item_bytes, strict=True):
            first_page = round_up(capacity * size, PAGE_BYTES)
            if first_page < len(arena):
                arena.madvise(mmap.MADV_DONTNEED, first_page, len(arena) - first_page)

    def forget(self, first_row: int, last_row: int) -> None:
        """Drop the rows of first_row <= row < last_row, whose groups are free again."""
        slots = self._slot_of_row[first_row:last_row]
        self._leave(slots[slots != _NOWHERE])

    def _leave(self, slots: NDArray[np.integer]) -> None:
        rows = self._row_of_slot[slots]
        self._slot_of_row[rows[rows != _NOWHERE]] = _NOWHERE
        self._row_of_slot[slots] = _NOWHERE
