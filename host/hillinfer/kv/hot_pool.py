# SPDX-License-Identifier: Apache-2.0
"""Copies of rows in DRAM, for one layer."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, private_memory, round_up
from hillinfer.kv.pool_policies import (
    PIN,
    RANKED_BY_PYTHON,
    PoolPolicy,
    RowHistory,
    native_worth,
)
from hillinfer.native.library import native_library
from hillinfer.native.structures import Places, PoolSlots, PoolTable, Promotion, row_addresses

if TYPE_CHECKING:
    from hillinfer.kv.sequence import Sequence

# --- The order in which rows deserve DRAM, at one moment ---


@dataclass(frozen=True)
class PoolMoment:
    """One decode step of one sequence in one layer, as a hot pool sees it.

    Parameters
    ----------
    step
        The current step.
    length
        Context length N of the sequence whose rows are offered.
    alpha
        Importance rate α.
    kept_sinks, kept_recent
        First and newest tokens, which are always selected and never demoted for others.
    """

    step: int
    length: int
    alpha: float
    kept_sinks: int
    kept_recent: int


# Rows of the same worth are told apart by so many steps, then by so many positions; with 33 bits
# of worth that fills an int64.
_STEPS = 1 << 10
_POSITIONS = 1 << 20
_KEPT = 2 * PIN


def rank(policy: PoolPolicy, rows: RowHistory, moment: PoolMoment) -> NDArray[np.int64]:
    """Return a key per row, int64 of shape (rows,): the larger, the sooner it stays hot.

    Kept tokens come first, then the policy's worth, then what was selected later, then what is
    newer.
    """
    recent = rows.lengths - moment.kept_recent
    kept = (rows.positions < moment.kept_sinks) | (rows.positions >= recent)
    worth = policy.worth(rows) + _KEPT * kept
    # A pool that must shrink ranks by the moment of its last promotion; hits may be later.
    age = np.clip(moment.step - rows.last_selected.astype(np.int64), 0, _STEPS - 1)
    newer = np.minimum(rows.positions, _POSITIONS - 1)
    keys: NDArray[np.int64] = (worth * _STEPS + (_STEPS - 1 - age)) * _POSITIONS + newer
    return keys


# --- the pool ---

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


@dataclass(frozen=True)
class Candidates:
    """Rows that are in memory at the moment and not in the hot pool.

    Parameters
    ----------
    rows
        int64 row numbers, each once.
    positions
        int32, their logical positions.
    counts
        uint16, their hits.
    source
        uint8 of shape (any, row_bytes), where their bytes lie.
    places
        int64, which rows of `source` they are.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int32]
    counts: NDArray[np.uint16]
    source: NDArray[np.uint8]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


class HotPool:
    """The hot pool of one layer: slots of rows, found by their row number (HillInfer, BKP).

    A row is on the drive whether it is hot or not, so demoting one writes nothing.

    Parameters
    ----------
    row_bytes
        Bytes of a row.
    most_rows
        Slots that address space is reserved for.
    policy
        Ranks rows.

    Raises
    ------
    NativeError
        The native library is missing.

    Attributes
    ----------
    policy
        Ranks rows; another may take its place while nothing is promoted.
    slot_of_row
        int32, the slot of each row number that is covered, -1 where it is not hot.
    table, table_address
        What decode steps in the native library find rows by.
    """

    def __init__(self, row_bytes: int, most_rows: int, policy: PoolPolicy) -> None:
        self._slots = SlotTable(most_rows, row_bytes)
        self.policy = policy
        self._row_bytes = row_bytes
        self.slot_of_row = np.full(0, NOWHERE, np.int32)
        self._used = 0
        self._library = native_library()
        # Memory of slots stays where it is, so the library is told once.
        self.table = PoolTable(
            slot_of_row=self.slot_of_row.ctypes.data,
            stamps=self._slots.last_selected.ctypes.data,
            slots=self._slots.data.ctypes.data,
        )
        self.table_address = ctypes.addressof(self.table)
        slots = self._slots
        known = slots.rows, slots.positions, slots.last_selected, slots.lengths, slots.counts
        self._columns = PoolSlots(
            self.slot_of_row.ctypes.data,
            0,
            slots.data.ctypes.data,
            row_bytes,
            *(one.ctypes.data for one in known),
        )

    @property
    def columns(self) -> SlotTable:
        """What each slot holds and what is known of it, those that are free included."""
        return self._slots

    @property
    def used_rows(self) -> int:
        """Slots this pool takes memory for."""
        return self._used

    @property
    def hot_rows(self) -> NDArray[np.int64]:
        """Row numbers of all rows in the pool, in no order."""
        rows = self._slots.rows[: self._used]
        return np.asarray(rows[rows != NOWHERE])

    def cover(self, rows: int) -> None:
        """Make room in the table for row numbers below `rows`."""
        if rows > len(self.slot_of_row):
            grown = np.full(rows, NOWHERE, np.int32)
            grown[: len(self.slot_of_row)] = self.slot_of_row
            self.slot_of_row = grown
            for table in (self.table, self._columns):
                table.slot_of_row, table.row_count = grown.ctypes.data, rows

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each row, -1 where it is not hot."""
        return self.slot_of_row[rows]

    def copy_out(
        self, slots: NDArray[np.int32], out: NDArray[np.uint8], places: NDArray[np.int64]
    ) -> None:
        """Copy rows from slots to places of `out`, uint8 of shape (any, row_bytes)."""
        out[places] = self._slots.data[slots]

    def addresses(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return where the rows in some slots lie in memory."""
        return row_addresses(self._slots.data, slots)

    def find(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory; see `locate`. Nobody has selected them."""
        return self._found(layer, sequence, positions, None, 0)

    def locate(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory, and note that they were selected in this step.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        positions
            int64, ascending.
        step
            The current step.

        Returns
        -------
        uint64 addresses in slots and tail, 0 for a row that is cold.

        Raises
        ------
        IndexError
            The sequence has no such position.
        """
        return self._found(layer, sequence, positions, self.table.stamps, step)

    def _found(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        stamps: int | None,
        step: int,
    ) -> NDArray[np.uint64]:
        wanted = np.ascontiguousarray(positions, np.int64)
        # Held until rows are found: another thread may replace the groups meanwhile.
        groups, groups_address = sequence.group_table()
        places = Places(
            wanted.ctypes.data,
            len(wanted),
            sequence.tail_start(layer),
            sequence.held_starts[layer],
            sequence.lengths[layer],
            sequence.tail_address(layer),
            groups_address,
            len(groups),
            self.table.slot_of_row,
            self.table.row_count,
            stamps,
            self.table.slots,
            self._row_bytes,
            step,
        )
        addresses = np.empty(len(wanted), np.uint64)
        self._library.row_places(places, addresses)
        return addresses

    def note_hits(self, slots: NDArray[np.int32], step: int) -> None:
        """Note that these slots were selected in this step."""
        self._slots.last_selected[slots] = step

    def refresh(
        self,
        rows_at: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        settled: int,
        counts: NDArray[np.uint16],
        length: int,
    ) -> None:
        """Learn what a sequence's hits are now, of its hot rows that were not selected as well.

        Parameters
        ----------
        rows_at
            Returns the row numbers of the sequence's positions, all below `settled`.
        settled
            Its tokens in full groups.
        counts
            uint16, its hit-rate table in this layer.
        length
            Its context length N.
        """
        slots = self._slots
        inside = slots.positions[: self._used] < settled
        # Of one sequence every slot is its own, and a slice costs a fraction of an index: every
        # step does this for all hot rows.
        which: slice | NDArray[np.int64] = slice(0, self._used)
        if not inside.all():
            which = np.flatnonzero(inside)
        positions = slots.positions[which].astype(np.int64)
        own = slots.rows[which] == rows_at(positions)
        if not own.all():
            which, positions = np.flatnonzero(inside)[own], positions[own]
        slots.counts[which] = counts[positions]
        slots.lengths[which] = length

    def growth(self, candidates: int, capacity: int) -> int:
        """Return by how many slots the pool would grow for so many candidates."""
        room = min(capacity, len(self._slots.rows)) - self._used
        free = int((self._slots.rows[: self._used] == NOWHERE).sum())
        return max(0, min(room, candidates - free))

    def grow(self, slots: int) -> None:
        """Take more slots, free at first."""
        self._slots.rows[self._used : self._used + slots] = NOWHERE
        self._used += slots

    def promote(
        self, candidates: Candidates, moment: PoolMoment, settled_before: int
    ) -> tuple[int, int]:
        """Promote candidates into free slots and in place of rows that are worth less.

        Parameters
        ----------
        candidates
            Rows of this layer; those that became hot meanwhile are left alone.
        moment
            For the ranking.
        settled_before
            Rows selected or written in this step or later stay: someone may be about to read
            them.

        Returns
        -------
        How many rows were promoted, and how many were demoted for them.
        """
        worth = native_worth(self.policy)
        keys = self._all_keys(candidates, moment) if worth == RANKED_BY_PYTHON else None
        source = candidates.source
        if source.shape[1:] != (self._row_bytes,) or not source.flags.c_contiguous:
            raise ValueError(f"rows of shape {source.shape} are no rows of {self._row_bytes} bytes")
        arrays = (
            np.ascontiguousarray(candidates.rows, np.int64),
            np.ascontiguousarray(candidates.positions, np.int32),
            np.ascontiguousarray(candidates.counts, np.uint16),
            source,
            np.ascontiguousarray(candidates.places, np.int64),
        )
        promotion = Promotion(
            *(one.ctypes.data for one in arrays),
            len(source),
            len(candidates),
            None if keys is None else keys[0].ctypes.data,
            None if keys is None else keys[1].ctypes.data,
            worth,
            moment.step,
            moment.length,
            settled_before,
            moment.kept_sinks,
            moment.kept_recent,
            moment.alpha,
        )
        self._columns.used = self._used
        # All of it without Python's lock: another thread computes meanwhile.
        self._library.promote(self._columns, promotion)
        return promotion.promoted, promotion.demoted

    def shrink(self, capacity: int, moment: PoolMoment) -> int:
        """Demote all but the best `capacity` rows, give their memory back, and say how many."""
        if capacity >= self._used:
            return 0
        slots = self._slots
        settled = np.flatnonzero(slots.rows[: self._used] != NOWHERE)
        keys = self._keys(settled, moment)
        demoted = settled[_least(keys, len(settled) - capacity)]
        self._leave(demoted)
        # Those that stay move together below the new end.
        occupied = slots.rows[: self._used] != NOWHERE
        sources = capacity + np.flatnonzero(occupied[capacity:])
        targets = np.flatnonzero(~occupied[:capacity])[: len(sources)]
        slots.move(sources, targets)
        self.slot_of_row[slots.rows[targets]] = targets
        self._used = capacity
        slots.give_back(capacity)
        return len(demoted)

    def forget(self, first_row: int, last_row: int) -> None:
        """Drop the rows of first_row <= row < last_row, whose groups are free again."""
        slots = self.slot_of_row[first_row:last_row]
        self._leave(slots[slots != NOWHERE])

    def _all_keys(
        self, candidates: Candidates, moment: PoolMoment
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the keys of candidates and slots, which the policy alone can rank.

        Where there is room for all of the candidates slots are not ranked.
        """
        count = len(candidates)
        steps = np.full(count, moment.step, np.int32)
        lengths = np.full(count, moment.length, np.int32)
        keys = self._rank(candidates.positions, candidates.counts, steps, lengths, moment)
        own = np.zeros(self._used, np.int64)
        occupied = self._slots.rows[: self._used] != NOWHERE
        cold = int((self.slot_of_row[candidates.rows] == NOWHERE).sum())
        if cold > self._used - int(occupied.sum()):
            settled = np.flatnonzero(occupied)
            own[settled] = self._keys(settled, moment)
        return np.ascontiguousarray(keys, np.int64), own

    def _keys(self, slots: NDArray[np.int64], moment: PoolMoment) -> NDArray[np.int64]:
        table = self._slots
        return self._rank(
            table.positions[slots],
            table.counts[slots],
            table.last_selected[slots],
            table.lengths[slots],
            moment,
        )

    def _rank(
        self,
        positions: NDArray[np.int32],
        counts: NDArray[np.uint16],
        last_selected: NDArray[np.int32],
        lengths: NDArray[np.int32],
        moment: PoolMoment,
    ) -> NDArray[np.int64]:
        rows = RowHistory(positions, counts, last_selected, lengths, moment.alpha)
        return rank(self.policy, rows, moment)

    def _leave(self, slots: NDArray[np.integer]) -> None:
        rows = self._slots.rows[slots]
        self.slot_of_row[rows[rows != NOWHERE]] = NOWHERE
        self._slots.rows[slots] = NOWHERE


def _least(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return where the smallest keys lie, rising; a pool of many rows is never sorted whole."""
    if count <= 0:
        return np.zeros(0, np.int64)
    if count >= len(keys):
        return np.argsort(keys)
    least = np.argpartition(keys, count - 1)[:count]
    return least[np.argsort(keys[least])]
