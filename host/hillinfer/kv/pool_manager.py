# SPDX-License-Identifier: Apache-2.0
"""Bidirectional KV pools: which rows are promoted and demoted, and when (HillInfer section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.kv.hot_pool import Candidates, PoolMoment
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.prefetch_buffer import LandedRows, PrefetchBuffer
from hillinfer.native.selected import MissList
from hillinfer.settings import Settings
from hillinfer.statistics import Counters, LayerHits
from hillinfer.trace.recorder import LayerStep, ReadCost

if TYPE_CHECKING:
    from hillinfer.kv.sequence import Sequence

# --- steps of a layer ---


class LayerStepLog:
    """Counts entries, and hands each on once what it promoted has been.

    Parameters
    ----------
    pools
        Know when promotions have ended.
    counters
        Where hot and cold rows are counted.
    layer_hits
        Where they are counted by layer.
    observe
        Called with the entry of each layer and step, from any thread; None where nobody is.
    """

    def __init__(
        self,
        pools: HotPools,
        counters: Counters,
        layer_hits: LayerHits,
        observe: Callable[[LayerStep], None] | None,
    ) -> None:
        self._pools = pools
        self._counters = counters
        self._layer_hits = layer_hits
        self._observe = observe

    def end(self, entry: LayerStep, sequence: Sequence) -> None:
        """Take an entry over whose rows, a sequence's, have all been looked at."""
        for counters, hits in (
            (self._counters, self._layer_hits),
            (sequence.counters, sequence.layer_hits),
        ):
            counters.hot_rows_read += entry.hot_rows
            counters.cold_rows_read += entry.cold_rows
            counters.drive_wait_seconds += entry.wait_seconds
            hits.add(entry.layer, entry.hot_rows, entry.cold_rows)
        sequence.count_reads(entry.reads, entry.read_bytes, entry.cold_rows)
        if self._observe is not None:
            self._pools.promotions.when_settled(entry.layer, partial(self._observe, entry))

    def end_hot(
        self, layer: int, sequence: Sequence, step: int, rows: int, coded: tuple[int, int] = (0, 0)
    ) -> None:
        """Take over that so many rows of a layer were looked at in a step, all of them hot.

        Beside them stand coded tokens, and those of these that DRAM had no codes of.
        """
        if self._observe is not None:
            entry = LayerStep(step, layer, sequence.lengths[layer], rows)
            entry.coded_tokens, entry.coded_arrivals = coded
            self.end(entry, sequence)
            return
        self._counters.hot_rows_read += rows
        self._layer_hits.hot[layer] += rows
        sequence.counters.hot_rows_read += rows
        sequence.layer_hits.hot[layer] += rows


# --- the life of rows that were read ahead ---

_Found = TypeVar("_Found")


class RowLife:
    """What was read ahead of a set of rows, from when it is taken over to the last look at it.

    Somebody looks at it in the block of code that this encloses. It is no generator's context:
    between the frames of one an interrupt would leave its memory taken.

    Parameters
    ----------
    prefetch
        Has read it.
    landed
        Which it is; None where nothing was read ahead.
    """

    def __init__(self, prefetch: PrefetchBuffer, landed: LandedRows | None) -> None:
        self._prefetch, self._landed = prefetch, landed
        self._taken: LandedRows | None = None

    def __enter__(self) -> Self:
        """Take nothing over yet: what goes wrong before `arrive` leaves it to who drops it."""
        return self

    def take(self) -> None:
        """Take it over; it may be on its way."""
        self._taken = self._landed
        self._prefetch.claim(self._landed)

    def arrive(self) -> ReadCost:
        """Take it over and wait until it is there; raises as `PrefetchBuffer.arrive` does."""
        self.take()
        return self._prefetch.arrive(self._landed)

    def promote(self, promoting: Future[tuple[int, int]]) -> None:
        """Leave its memory alone until a promotion from there has ended, too."""
        if self._taken is not None:
            self._taken.promoting = promoting

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Free its memory, once nothing is read to it or promoted from it."""
        self._prefetch.let_go(self._taken)


class SelectedLife(RowLife):
    """The same of a selected set, whose cold rows become hot.

    Parameters
    ----------
    prefetch, landed
        As in `RowLife`.
    pools
        Where they become hot.
    entry
        Of the timeline; learns what was read ahead, and how long attention has waited for it.
    misses
        Learns where it lies, as long as somebody looks; None where nobody asks it.
    """

    def __init__(
        self,
        prefetch: PrefetchBuffer,
        landed: LandedRows | None,
        pools: HotPools,
        entry: LayerStep,
        misses: MissList | None = None,
    ) -> None:
        super().__init__(prefetch, landed)
        self._pools, self._entry, self._misses = pools, entry, misses

    def arrive(self) -> ReadCost:
        """Do as `RowLife.arrive`, and tell where it lies and what it took."""
        self.take()
        return self._arrived()

    def arrive_by(self, look: Callable[[], _Found]) -> _Found:
        """Return what a call of the library says that looks once all is there.

        It waits itself where it can: it looks for nothing where something did not come.
        """
        landed, misses = self._landed, self._misses
        self.take()
        awaited = None if landed is None or misses is None else landed.awaited
        if landed is not None and misses is not None and awaited is not None:
            misses.tell_landed(landed.positions, landed.places, self._prefetch.rows, awaited)
            found = look()
            self._entry.wait_seconds += awaited.nanoseconds / 1e9
            if awaited.is_whole:
                self._arrived()
                return found
        self._arrived()
        return look()

    def _arrived(self) -> ReadCost:
        started, landed = time.perf_counter(), self._landed
        self._entry.note_reads(cost := self._prefetch.arrive(landed))
        self._entry.wait_seconds += time.perf_counter() - started
        if self._misses is not None and landed is not None:
            self._misses.tell_landed(landed.positions, landed.places, self._prefetch.rows)
        return cost

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Do as `RowLife`; where something went wrong nothing is promoted any more, either."""
        try:
            if kind is not None and not issubclass(kind, GeneratorExit):
                # An interrupt may have come before a promotion that has begun was noted.
                self._pools.promotions.finish()
        finally:
            if self._misses is not None:
                self._misses.forget_landed()
            super().__exit__(kind, error, trace)


# --- promotion and demotion ---

Seen = Callable[[NDArray[np.int64], NDArray[np.uint8]], Future[tuple[int, int]] | None]
REDISTRIBUTION_STEPS = 16


class PoolManager:
    """Keeps hit-rate tables and moves rows between the pools (HillInfer section 4.2, BKP).

    Every row in a full group is on the drive, so a cold row is promoted by keeping the copy that
    attention has just read, and a hot one demoted by forgetting its copy.

    Parameters
    ----------
    pools
        The hot pools.
    policy
        Tallies hits and ranks rows.
    settings
        α and the kept tokens.
    counters
        Where moves are counted.
    """

    def __init__(
        self, pools: HotPools, policy: PoolPolicy, settings: Settings, counters: Counters
    ) -> None:
        self._pools = pools
        self._policy = policy
        self._settings = settings
        self._counters = counters
        self._misses = np.zeros(len(pools.layers), np.int64)
        self._step = self._redistributed_in = 0

    @property
    def observed_queries(self) -> int:
        """How many of the last prefill queries the policy wants to see selections of."""
        return self._policy.observed_queries

    def begin_step(self, step: int) -> None:
        """Note which step this is, and divide the memory among layers anew every 16 steps."""
        self._step = step
        if step - self._redistributed_in >= REDISTRIBUTION_STEPS:
            self._pools.redistribute(self._misses)
            self._misses[:] = 0
            self._redistributed_in = step

    def tally(self, layer: int, sequence: Sequence, selected: NDArray[np.int64]) -> None:
        """Bring the hit-rate table up to date with a selected set, int64 positions."""
        self._pools.hits.tell_of(layer, sequence)
        self._tally(layer, sequence, selected)

    def begin_in_place(
        self, layer: int, sequence: Sequence, selected: NDArray[np.int64], step: int
    ) -> NDArray[np.uint64]:
        """Count a selected set as hits, and keep its hot rows where they are until they are read.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        selected
            int64 positions, ascending.
        step
            The current step.

        Returns
        -------
        Where rows lie, 0 where one is cold; see `HotPool.locate`.
        """
        self._count(layer, sequence, selected)
        return self._pools.layers[layer].locate(layer, sequence, selected, step)

    def offer_read(
        self,
        entry: LayerStep,
        sequence: Sequence,
        positions: NDArray[np.int64],
        source: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> Future[tuple[int, int]]:
        """Let rows that were cold become hot, in the background.

        Parameters
        ----------
        entry
            Of the timeline; learns how many rows were moved.
        sequence
            Whose rows.
        positions
            int64, in full groups.
        source, places
            uint8 of shape (any, row_bytes), and where in it each row lies; to be left alone until
            the returned future is done.
        """
        return self.offer_missed(
            entry, sequence, _candidates(entry.layer, sequence, positions, source, places)
        )

    def offer_missed(
        self, entry: LayerStep, sequence: Sequence, candidates: Candidates
    ) -> Future[tuple[int, int]]:
        """Let rows that were cold become hot; see `offer_read`."""

        def note(moved: tuple[int, int]) -> None:
            entry.promoted += moved[0]
            entry.demoted += moved[1]
            for counters in (self._counters, sequence.counters):
                counters.promoted_rows += moved[0]
                counters.demoted_rows += moved[1]

        self._misses[entry.layer] += len(candidates)
        return self._offer(entry.layer, sequence, candidates, entry.step, entry.step, note)

    @contextmanager
    def seeing(self, layer: int, sequence: Sequence) -> Iterator[Seen]:
        """Yield what lets rows that a dense pass looks at become hot where there is room.

        A stored prompt that is opened has no hot row. Where there is memory for all of it, each of
        its rows would be read twice: by the pass, and a page for each once they are selected.

        It is called with int64 positions, ascending, and their rows, uint8 (rows, row_bytes), to be
        left alone until the returned future is done; None is returned where nothing becomes hot.
        Rows that are hot, or in no full group, are left out.
        """
        self._pools.settle(layer)
        # Before any row is looked for: slots move where pools give way for a table that grows.
        settled, length = sequence.tail_start(layer), sequence.lengths[layer]
        self._pools.cover_hits(sequence.hits, layer, length)
        self._pools.hits.note(layer, sequence, settled, length)
        try:
            yield partial(self._offer_seen, layer, sequence)
        except GeneratorExit:
            raise
        except BaseException:
            # An interrupt may have come before a promotion that has begun was noted.
            self._pools.promotions.finish()
            raise

    def offer_written(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        source: NDArray[np.uint8],
        step: int,
    ) -> Future[tuple[int, int]]:
        """Let rows of groups that have just become full be hot, in the background.

        Consecutive steps mostly select recent tokens, so these are worth offering. They were in
        DRAM all the time and are not counted as promoted.

        Parameters as in `offer_read`.
        """
        places = np.arange(len(positions))
        length = int(positions[-1]) + 1
        self._pools.settle(layer)
        self._pools.cover_hits(sequence.hits, layer, length)
        self._pools.hits.note(layer, sequence, length, length)
        candidates = _candidates(layer, sequence, positions, source, places)
        # Nobody reads now, so rows of this very step may give way too.
        return self._offer(layer, sequence, candidates, step, step + 1, _ignore)

    def _offer_seen(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        source: NDArray[np.uint8],
    ) -> Future[tuple[int, int]] | None:
        self._pools.settle(layer)
        room = self._pools.room(layer) if self._policy.takes_seen else 0
        if not room:
            return None
        settled = positions[: np.searchsorted(positions, sequence.tail_start(layer))]
        slots = self._pools.layers[layer].slots(sequence.rows(settled))
        places = np.flatnonzero(slots < 0)[:room]
        if not len(places):
            return None

        def note(moved: tuple[int, int]) -> None:
            for counters in (self._counters, sequence.counters):
                counters.promoted_rows += moved[0]

        candidates = _candidates(layer, sequence, settled[places], source, places)
        # From step 0 on hot rows stay, so that all do.
        return self._offer(layer, sequence, candidates, self._step, 0, note)

    def _count(self, layer: int, sequence: Sequence, selected: NDArray[np.int64]) -> None:
        self._pools.settle(layer)
        self._tally(layer, sequence, selected)
        settled, length = sequence.tail_start(layer), sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, settled, length)

    def _tally(self, layer: int, sequence: Sequence, selected: NDArray[np.int64]) -> None:
        self._pools.cover_hits(sequence.hits, layer, sequence.lengths[layer])
        self._policy.tally(sequence.hits.counts[layer], selected)

    def _offer(
        self,
        layer: int,
        sequence: Sequence,
        candidates: Candidates,
        step: int,
        settled_before: int,
        done: Callable[[tuple[int, int]], None],
    ) -> Future[tuple[int, int]]:
        settings = self._settings
        moment = PoolMoment(
            step=step,
            length=max(sequence.lengths[layer], int(candidates.positions[-1]) + 1),
            alpha=settings.importance_rate,
            kept_sinks=settings.kept_sinks,
            kept_recent=settings.kept_recent,
        )
        return self._pools.promote(layer, candidates, moment, settled_before, done)


def _candidates(
    layer: int,
    sequence: Sequence,
    positions: NDArray[np.int64],
    source: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> Candidates:
    return Candidates(
        rows=sequence.rows(positions),
        positions=positions.astype(np.int32),
        counts=sequence.hits.counts[layer][positions],
        source=source,
        places=places,
    )


def _ignore(moved: tuple[int, int]) -> None:
    """Count nothing."""
