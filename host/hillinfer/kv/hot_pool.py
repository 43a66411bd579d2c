# SPDX-License-Identifier: Apache-2.0
"""Copies of rows in DRAM, for one layer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from hillinfer.kv.pool_policies import (
    PIN,
    RANKED_BY_PYTHON,
    PoolPolicy,
    RowHistory,
    native_worth,
)
from hillinfer.kv.sequence import NotedHits, Sequence
from hillinfer.native.library import native_library
from hillinfer.native.structures import Promotion, address_of, row_addresses
from hillinfer.native.tables import PoolTables

# --- The order in which rows deserve DRAM, at one moment ---


@dataclass(frozen=True)
class PoolMoment:
    """One decode step of one sequence in one layer, as a hot pool sees it.

    Parameters
    ----------
    length
        Context length N of the sequence whose rows are offered.
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
# A step that stamps no slot.
_NOBODY = -1
# Row number, position, step of the last selection, length of its sequence, hits.
SLOT_BYTES = 8 + 4 + 4 + 4 + 2


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
    columns
        What each slot holds and what is known of it, those that are free included; the native
        library owns it.
    table, table_address
        What decode steps in the native library find rows by.
    """

    def __init__(self, row_bytes: int, most_rows: int, policy: PoolPolicy) -> None:
        self.columns = PoolTables(most_rows, row_bytes)
        self.policy = policy
        self._row_bytes = row_bytes
        self._library = native_library()
        self.table, self.table_address = self.columns.table, self.columns.address

    @property
    def slot_of_row(self) -> NDArray[np.int32]:
        """The slot of each row number that is covered, int32, -1 where it is not hot."""
        return self.columns.slot_of_row

    @property
    def used_rows(self) -> int:
        """Slots this pool takes memory for."""
        return self.columns.used

    @property
    def hot_rows(self) -> NDArray[np.int64]:
        """Row numbers of all rows in the pool, in no order."""
        rows = self.columns.rows[: self.used_rows]
        return np.asarray(rows[rows != NOWHERE])

    def cover(self, rows: int) -> None:
        """Make room in the table for row numbers below `rows`."""
        if rows > len(self.slot_of_row):
            self.columns.cover(rows)

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each row, -1 where it is not hot."""
        return self.slot_of_row[rows]

    def addresses(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return where the rows in some slots lie in memory."""
        return row_addresses(self.columns.data, slots)

    def find(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory; see `locate`. Nobody has selected them."""
        return self.locate(layer, sequence, positions, _NOBODY)

    def locate(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> NDArray[np.uint64]:
        """Return where rows lie in memory, and note that they were selected in this step.

        Parameters
        ----------
        positions
            int64, ascending.

        Returns
        -------
        uint64 addresses in slots and tail, 0 for a row that is cold.

        Raises
        ------
        IndexError
            The sequence has no such position.
        """
        wanted = np.ascontiguousarray(positions, np.int64)
        addresses = np.empty(len(wanted), np.uint64)
        table = sequence.table_addresses[layer]
        self._library.find_rows(table, self.table_address, wanted, step, addresses)
        return addresses

    def refresh(
        self, layer: int, sequence: Sequence, settled: int, length: int, fades: int = 0
    ) -> None:
        """Learn what a sequence's hits are now, of its hot rows that were not selected as well.

        Parameters
        ----------
        settled
            Its tokens in full groups.
        length
            Its context length N.
        fades
            How often they have faded beside what its own steps let fade.
        """
        table, shift = sequence.table_addresses[layer], self.policy.fade_shift
        self.columns.refresh(table, settled, length, fades, shift)

    def growth(self, candidates: int, capacity: int) -> int:
        """Return by how many slots the pool would grow for so many candidates."""
        room = min(capacity, len(self.columns.rows)) - self.used_rows
        return max(0, min(room, candidates - self.columns.free)) if room > 0 else 0

    def grow(self, slots: int) -> None:
        """Take more slots, free at first."""
        self.columns.grow(slots)

    def promote(
        self, candidates: Candidates, moment: PoolMoment, settled_before: int
    ) -> tuple[int, int]:
        """Promote candidates into free slots and in place of rows that are worth less.

        Parameters
        ----------
        candidates
            Rows of this layer; those that became hot meanwhile are left alone.
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
        promotion = _moment(moment, worth, None if keys is None else keys[1])
        addresses = [address_of(one) for one in arrays]
        promotion.rows, promotion.positions, promotion.counts = addresses[:3]
        promotion.source, promotion.places = addresses[3:]
        promotion.source_rows, promotion.count = len(source), len(candidates)
        promotion.keys = None if keys is None else address_of(keys[0])
        promotion.settled_before = settled_before
        # All of it without Python's lock: another thread computes meanwhile.
        self._library.promote(self.table_address, promotion)
        return promotion.promoted, promotion.demoted

    def shrink(self, capacity: int, moment: PoolMoment) -> int:
        """Demote all but the best `capacity` rows, give their memory back, and say how many."""
        if capacity >= self.used_rows:
            return 0
        worth = native_worth(self.policy)
        keys = self._slot_keys(moment) if worth == RANKED_BY_PYTHON else None
        return self.columns.shrink(capacity, _moment(moment, worth, keys))

    def forget(self, first_row: int, last_row: int) -> None:
        """Drop the rows of first_row <= row < last_row, whose groups are free again."""
        self.columns.forget(first_row, last_row)

    def _all_keys(
        self, candidates: Candidates, moment: PoolMoment
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the keys of candidates and slots, which the policy alone can rank.

        Where there is room for all of the candidates slots are not ranked.
        """
        count = len(candidates)
        steps = np.full(count, moment.step, np.int32)
        lengths = np.full(count, moment.length, np.int32)
        history = candidates.positions, candidates.counts, steps, lengths
        keys = rank(self.policy, RowHistory(*history, moment.alpha), moment)
        cold = int((self.slot_of_row[candidates.rows] == NOWHERE).sum())
        crowded = cold > self.columns.free
        own = self._slot_keys(moment) if crowded else np.zeros(self.used_rows, np.int64)
        return np.ascontiguousarray(keys, np.int64), own

    def _slot_keys(self, moment: PoolMoment) -> NDArray[np.int64]:
        """Return the keys of all slots by the policy alone, 0 for those that are free."""
        own = np.zeros(self.used_rows, np.int64)
        settled = np.flatnonzero(self.columns.rows[: self.used_rows] != NOWHERE)
        table = self.columns
        history = RowHistory(
            table.positions[settled],
            table.counts[settled],
            table.last_selected[settled],
            table.lengths[settled],
            moment.alpha,
        )
        own[settled] = rank(self.policy, history, moment)
        return own


def _moment(moment: PoolMoment, worth: int, slot_keys: NDArray[np.int64] | None) -> Promotion:
    """Return how rows rank in a moment, with no candidates."""
    return Promotion(
        slot_keys=None if slot_keys is None else slot_keys.ctypes.data,
        worth=worth,
        step=moment.step,
        length=moment.length,
        kept_sinks=moment.kept_sinks,
        kept_recent=moment.kept_recent,
        alpha=moment.alpha,
    )


# --- hits as pools are told of them ---

# Rounds of others' steps that a sequence's hits do not fade in, and rounds in which they then fade
# once. Of caches that take turns by single steps none fades.
_GRACE_ROUNDS = 1
_FADING_ROUNDS = 2


@dataclass(eq=False)
class _Told:
    """What a pool is told of a sequence: as `note` was given it, when, and faded how often."""

    of: ref[Sequence]
    settled: int = 0
    length: int = 0
    # Later where others were forgotten since.
    at: int = 0
    # Those of others since then, as many as there were when their number changed last.
    rounds: int = 0
    # As the pool knows its hits, below 0 where it knows others.
    fades: int = 0

    def rounds_of(self, others: int, clock: int) -> int:
        """Return the rounds of so many others until then; they never become fewer."""
        return max(self.rounds, (clock - self.at) // others) if others else self.rounds


class PendingHits(NotedHits):
    """Tells pools what hits are now only once they are about to rank their rows.

    To tell costs as much as looking at every hot row, and as long as all selected rows are hot
    nothing is ranked. Ranks are those of pools that are told at once.

    Hits of a sequence fade with its own steps. While others take steps and it takes none, the pool
    is told fewer of it: one of them that steps twice makes a round, and every second round fades
    them once. Its table keeps what it was, so its next step ranks by that. Of rows that sequences
    share the pool knows the hits of the one that was noted last.
    """

    most_fades: int = 40
    """How often hits fade beside what their own steps let fade; of any number 3 are left then."""

    def __init__(self, pools: list[HotPool]) -> None:
        super().__init__(len(pools))
        self._pools = pools
        # The last noted at the end. Other threads may look at a list, so none is changed.
        self._known: list[list[_Told]] = [[] for _ in pools]

    def forget(self, sequence: Sequence) -> None:
        """Let a sequence that is closed take part in nobody's rounds any more."""
        for layer, clock in enumerate(self._clock):
            self._end_turn(layer)
            self._pending[layer].pop(sequence, None)
            known, before = self._without(layer, sequence)
            for others, one in enumerate(reversed(known[:before]), len(known) - before):
                # Until now there were as many rounds as there were with it.
                rounds = (clock - one.at) // (others + 1)
                one.rounds, one.at = max(one.rounds, rounds), clock - rounds * others
            self._known[layer] = known

    def tell(self, layer: int) -> None:
        """Tell a layer's pool everything noted, in that order."""
        pending = self._pending[layer]
        if pending:
            self._end_turn(layer)
            self._pending[layer] = {}
            for sequence, one in self._changed(layer, pending):
                pool = self._pools[layer]
                pool.refresh(layer, sequence, one.settled, one.length, one.fades)

    def tell_of(self, layer: int, sequence: Sequence) -> None:
        """Do so before a sequence's hits or rows change in a way that is not noted."""
        for one in self._known[layer]:
            if one.of() is sequence:
                # Where others were noted since, its own may have faded.
                self.tell(layer)
                # What they become the pool hears when it is told of anybody.
                one.fades = -1

    def _changed(self, layer: int, noted: Container[Sequence]) -> list[tuple[Sequence, _Told]]:
        """Let hits fade while others take steps; return what the pool does not know, in order.

        That is of those noted, and of idle ones whose hits faded. Either may write to shared rows,
        which those that were noted later write to again.
        """
        alive = [(one.of(), one) for one in self._known[layer]]
        known = [(sequence, one) for sequence, one in alive if sequence is not None]
        is_fading = bool(self._pools[layer].policy.fade_shift)
        changed: list[tuple[Sequence, _Told]] = []
        for number, (sequence, one) in enumerate(known, 1):
            others = len(known) - number
            rounds = one.rounds_of(others, self._clock[layer]) * is_fading
            fades = min(max(0, rounds - _GRACE_ROUNDS) // _FADING_ROUNDS, self.most_fades)
            is_other, one.fades = fades != one.fades or sequence in noted, fades
            if is_other or any(sequence.shares_groups(before) for before, _ in changed):
                changed.append((sequence, one))
        return changed

    def _begin_turn(self, layer: int, sequence: Sequence) -> None:
        self._end_turn(layer)
        known, before = self._without(layer, sequence)
        # From here on one more takes part in the rounds of those that it overtakes.
        for others, one in enumerate(reversed(known[before:])):
            one.rounds = one.rounds_of(others, self._clock[layer] - 1)
        self._known[layer] = [*known, _Told(ref(sequence), at=self._clock[layer])]

    def _end_turn(self, layer: int) -> None:
        """Learn what was noted last of who was noted last."""
        for one in self._known[layer][-1:]:
            sequence = one.of()
            if sequence is not None and sequence in self._pending[layer]:
                one.settled, one.length, one.at = self._pending[layer][sequence]

    def _without(self, layer: int, sequence: Sequence) -> tuple[list[_Told], int]:
        """Return who is known beside a sequence, and how many of them were noted before it."""
        known = [one for one in self._known[layer] if one.of() is not None]
        for number, one in enumerate(known):
            if one.of() is sequence:
                return known[:number] + known[number + 1 :], number
        return known, 0
