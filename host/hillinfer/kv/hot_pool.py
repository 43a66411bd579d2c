# SPDX-License-Identifier: Apache-2.0
"""Copies of rows in DRAM, for one layer, and the promotions of all layers that are under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.kv.pool_policies import (
    PIN,
    RANKED_BY_PYTHON,
    PoolPolicy,
    RowHistory,
    native_worth,
)
from hillinfer.kv.sequence import Sequence
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


# --- promotions that are under way ---

Exchange = Future[tuple[int, int]]


class Promotions:
    """Promotions of all layers that are under way, and the thread that makes those of many rows.

    What goes wrong the next who settles is told, whoever moved rows.

    Attributes
    ----------
    under_way
        Of each layer what has begun and nobody has waited for; to be looked at.
    failure
        What went wrong and nobody was told; None for nothing.
    """

    def __init__(self, layers: int) -> None:
        self.under_way: list[list[Exchange]] = [[] for _ in range(layers)]
        self.failure: BaseException | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-pool")

    def begin(self, layer: int, exchange: Callable[[], tuple[int, int]]) -> Exchange:
        """Have the background thread make a layer's promotion."""
        begun = self._background.submit(exchange)
        self.under_way[layer].append(begun)
        return begun

    def make(self, layer: int, exchange: Callable[[], tuple[int, int]]) -> Exchange:
        """Make a layer's promotion at once, in the calling thread; errors are kept."""
        made: Exchange = Future()
        try:
            made.set_result(exchange())
        except Exception as error:
            made.set_exception(error)
        self.under_way[layer].append(made)
        return made

    def settle(self, layer: int) -> None:
        """Wait until a layer's promotions are done; raise what went wrong, once."""
        self._end_of(layer)
        self._raise_failure()

    def settle_all(self) -> None:
        """Wait until all promotions are done; raise what went wrong, once."""
        self.end()
        self._raise_failure()

    def end(self) -> None:
        """Wait until all promotions are done; what went wrong is left for the next who settles.

        Whoever gives groups or memory up must not stop half-way.
        """
        for layer in range(len(self.under_way)):
            self._end_of(layer)

    def wait_for(self, layer: int) -> None:
        """Wait until what is under way in a layer is done; what went wrong is left for `settle`.

        For a thread that only looks.
        """
        for exchange in list(self.under_way[layer]):
            # Not `wait` of the library, which waits for ever for one that `close` cancelled.
            with suppress(CancelledError):
                exchange.exception()

    def finish(self) -> None:
        """Wait until whatever the background thread was given is done, noted here or not.

        For a thread that was interrupted while it began a promotion.
        """
        # Closed, nothing is under way.
        with suppress(CancelledError, RuntimeError):
            self._background.submit(int).exception()

    def when_settled(self, layer: int, done: Callable[[], None]) -> None:
        """Call `done` from the background thread after what is under way in a layer.

        What it raises there, the next `settle` raises.
        """

        def settled(exchange: Exchange) -> None:
            # A future only logs what its callbacks raise.
            try:
                done()
            except BaseException as error:
                self.failure = self.failure or error

        if self.under_way[layer]:
            # Also called where `close` cancels it.
            self.under_way[layer][-1].add_done_callback(settled)
        else:
            done()

    def close(self) -> None:
        """Stop the background thread; nothing is under way afterwards."""
        self._background.shutdown(cancel_futures=True)
        self.under_way = [[] for _ in self.under_way]

    def _end_of(self, layer: int) -> None:
        # Two threads may wait for the same ones, and neither goes on before they are done.
        for exchange in list(self.under_way[layer]):
            with suppress(CancelledError):
                failure = exchange.exception()
                self.failure = self.failure or failure
            with suppress(ValueError):
                self.under_way[layer].remove(exchange)

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
