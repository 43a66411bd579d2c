# SPDX-License-Identifier: Apache-2.0
"""Brings rows together, wherever they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.native.addresses import row_addresses
from hillinfer.native.structures import Places
from hillinfer.pools.hot_pool import Attended
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.layer_step import LayerStep
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.landing_area import LandingArea
from hillinfer.storage.read_cost import ReadCost
from hillinfer.storage.rows_ahead import RowsAhead
from hillinfer.storage.sequence import Sequence
from hillinfer_model.kernel_spec import GROUP_TOKENS

T = TypeVar("T")


@dataclass(frozen=True)
class _Gathered:
    """Rows in a buffer, which of them came from the drive, and what that took."""

    rows: NDArray[np.uint8]
    cold: NDArray[np.int64]
    cost: ReadCost


class RowReader:
    """Finds or gathers rows by position in tail, hot pool, landing area and on the drive.

    Cold rows may be read ahead (`land`); what was not is read in blocks of a fixed size, the next
    one while the caller computes on the one before. Cold rows are promoted from where they landed
    meanwhile.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    keeper
        Promotes rows that were read.
    landing
        Where rows land that are read ahead.
    block_rows, row_bytes
        Size of a block.
    counters
        Where hot and cold rows are counted.
    layer_hits
        Where they are counted by layer.
    observe
        Called with the entry of each layer and step, from any thread.
    """

    def __init__(
        self,
        store: ColdStore,
        pools: HotPools,
        keeper: PoolKeeper,
        landing: LandingArea,
        block_rows: int,
        row_bytes: int,
        counters: Counters,
        layer_hits: LayerHits,
        observe: Callable[[LayerStep], None],
    ) -> None:
        self._store = store
        self._pools = pools
        self._keeper = keeper
        self._block_rows = block_rows
        self._counters = counters
        self._layer_hits = layer_hits
        self._observe = observe
        # At least a group, so that a tile of attention never waits for two buffers.
        self._buffer_rows = max(block_rows, GROUP_TOKENS)
        size = self._buffer_rows * row_bytes
        self._buffers = [aligned_buffer(size)[:size].reshape(-1, row_bytes) for _ in range(2)]
        self._row_bytes = row_bytes
        self._promoting: list[Future[tuple[int, int]] | None] = [None, None]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-gather")
        self._landed = RowsAhead(store, landing)
        self._upcoming: Future[_Gathered] | None = None

    def stream(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield blocks of rows, uint8 (at most block_rows, row_bytes), valid until the next.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        positions
            int64 logical positions, ascending.
        """
        self._pools.settle(layer)
        started = time.perf_counter()
        for _, _, gathered in self._blocks(layer, sequence, positions):
            self._counters.drive_wait_seconds += time.perf_counter() - started
            yield gathered.rows
            started = time.perf_counter()

    def from_drive(
        self, layer: int, sequence: Sequence, start: int, stop: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield rows of full groups as the drive has them, valid until the next; any thread may.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        start, stop
            Positions of the first one and behind the last one.
        """
        rows = np.empty((GROUP_TOKENS, self._row_bytes), np.uint8)
        for first in range(start, stop, GROUP_TOKENS):
            positions = np.arange(first, min(first + GROUP_TOKENS, stop))
            own, places = rows[: len(positions)], np.arange(len(positions))
            self._store.read_rows(layer, sequence.rows(positions), own, places)
            yield own

    def land(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], on_drive: int
    ) -> LandedRows | None:
        """Begin to read the cold rows of a selection, in blocks as they become free.

        Called from the thread that scores, while the one that attends is at an earlier layer: what
        is hot may have changed when `fetch` looks again, so nothing depends on it but time.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        positions
            int64, ascending.
        on_drive
            Rows from this position on are not to be read: they are in the tail.

        Returns
        -------
        What lands where, or None where nothing does.
        """
        self._pools.wait_for(layer)
        settled = positions[: np.searchsorted(positions, on_drive)]
        rows = sequence.rows(settled)
        cold = np.flatnonzero(self._pools.layers[layer].slots(rows) < 0)
        return self._landed.begin(layer, settled[cold], rows[cold])

    def copy_held(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        on_drive: int,
        landed: LandedRows | None,
        out: NDArray[np.uint8],
    ) -> NDArray[np.int64]:
        """Copy those rows that are in memory, for whoever sends them on before `fetch`.

        Called while the thread that attends is at an earlier layer.

        Parameters
        ----------
        layer, sequence, positions, on_drive
            As in `land`.
        landed
            What it returned, read by now, or None.
        out
            uint8 (at least as many rows, row_bytes).

        Returns
        -------
        Which of the positions were copied, int64, ascending, as the first rows of `out`.
        """
        settled = int(np.searchsorted(positions, on_drive))
        # Nothing gives hot rows up meanwhile: what the attention of another sequence has offered is
        # promoted by then, and nobody offers more.
        with self._pools.attending:
            self._pools.wait_for(layer)
            pool = self._pools.layers[layer]
            slots = pool.slots(sequence.rows(positions[:settled]))
            held = np.ones(len(positions), bool)
            held[:settled] = slots >= 0
            arrived = np.zeros(0, np.int64)
            if landed is not None:
                cold = np.flatnonzero(~held)
                came = landed.among(positions[cold])
                arrived = cold[came]
                held[arrived] = True
            place = np.cumsum(held) - 1
            hot = np.flatnonzero(slots >= 0)
            pool.copy_out(slots[hot], out, place[hot])
            if landed is not None:
                out[place[arrived]] = self._landed.rows[landed.places_of(positions[arrived])]
            out[place[settled:]] = sequence.tails[layer][positions[settled:] - on_drive]
        return np.flatnonzero(held)

    def want(self, landed: LandedRows | None) -> None:
        """Let what `land` began end with what it has room for: its attention is about to begin."""
        self._landed.want(landed)

    def abandon_unclaimed(self) -> None:
        """Free what landed for attention that did not come; nothing is being announced."""
        self._landed.abandon_unclaimed()

    def fetch(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None = None,
    ) -> Generator[tuple[NDArray[np.int64], NDArray[np.uint8]], None, None]:
        """Yield blocks of selected positions and their rows, and promote those that were cold.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        positions
            int64 logical positions, ascending.
        step
            The decode step, which hot rows are stamped with.
        landed
            What of them `land` has read ahead; given up here.
        """
        with self._pools.attending:
            self._keeper.begin_reading(layer, sequence, positions, step)
            entry = LayerStep(step, layer, sequence.lengths[layer])
            started = time.perf_counter()
            try:
                self._landed.claim(landed)
                _note_reads(entry, self._landed.arrive(landed))
                blocks = self._blocks(layer, sequence, positions, landed)
                for which, block, gathered in blocks:
                    rows, cold = gathered.rows, gathered.cold
                    _note_reads(entry, gathered.cost)
                    entry.hot_rows += len(block) - len(cold)
                    entry.cold_rows += len(cold)
                    if len(cold):
                        self._promoting[which] = self._keeper.offer_read(
                            entry, sequence, block[cold], rows, cold
                        )
                    entry.wait_seconds += time.perf_counter() - started
                    yield block, rows
                    started = time.perf_counter()
            except GeneratorExit:
                raise
            except BaseException:
                # An interrupt may have come before a promotion that has begun was noted.
                self._pools.finish()
                raise
            finally:
                self._landed.let_go(landed)
        self._end(entry)

    @property
    def attending(self) -> AbstractContextManager[object]:
        """To be held while rows are attended to that `attend_hot` found."""
        return self._pools.attending

    def attend_hot(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        attend: Callable[[Places], Attended[T]],
    ) -> Attended[T]:
        """Attend to selected rows where they lie, if all of them are in memory.

        Called with `attending` held.

        Parameters
        ----------
        layer, sequence, positions, step
            As in `fetch`; at least one position.
        attend
            Finds rows and attends to them if none of them is cold.

        Returns
        -------
        What `attend` made of them, or None, and addresses for `fetch_in_place`.
        """
        made, addresses = self._keeper.attend_in_place(layer, sequence, positions, step, attend)
        if made is not None:
            self._end(LayerStep(step, layer, sequence.lengths[layer], len(positions)))
        return made, addresses

    def fetch_in_place(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None,
        tile_rows: int,
        addresses: NDArray[np.uint64] | None = None,
    ) -> Generator[NDArray[np.uint64], None, None]:
        """Yield the addresses of selected rows where they lie, and promote those that were cold.

        Parameters
        ----------
        layer, sequence, positions, step, landed
            As in `fetch`.
        tile_rows
            All runs but the last are multiples of it; at most 64.
        addresses
            From `attend_hot`, where that was asked first and `attending` is held since.

        Yields
        ------
        uint64 addresses of consecutive runs of the positions, valid until the next.
        """
        promoting: Future[tuple[int, int]] | None = None
        with self._pools.attending:
            if addresses is None:
                addresses = self._keeper.begin_in_place(layer, sequence, positions, step)
            entry = LayerStep(step, layer, sequence.lengths[layer])
            started = time.perf_counter()
            try:
                self._landed.claim(landed)
                _note_reads(entry, self._landed.arrive(landed))
                arrived, rest = self._arrived(positions, addresses, landed)
                entry.cold_rows = len(arrived) + len(rest)
                entry.hot_rows = len(positions) - entry.cold_rows
                if landed is not None and len(arrived):
                    promoting = self._keeper.offer_read(
                        entry,
                        sequence,
                        positions[arrived],
                        self._landed.rows,
                        landed.places_of(positions[arrived]),
                    )
                runs = _runs(len(positions), rest, tile_rows, self._buffer_rows)
                wanted = [own for _, _, own in runs]
                for number, gathered in self._read_ahead(layer, sequence, positions, wanted):
                    start, stop, own = runs[number]
                    if gathered is not None:
                        which, from_drive = gathered
                        _note_reads(entry, from_drive.cost)
                        addresses[own] = row_addresses(from_drive.rows, from_drive.cold)
                        self._promoting[which] = self._keeper.offer_read(
                            entry, sequence, positions[own], from_drive.rows, from_drive.cold
                        )
                    entry.wait_seconds += time.perf_counter() - started
                    yield addresses[start:stop]
                    started = time.perf_counter()
            except GeneratorExit:
                raise
            except BaseException:
                # An interrupt may have come before a promotion that has begun was noted.
                self._pools.finish()
                raise
            finally:
                self._landed.let_go(landed, promoting)
        self._end(entry)

    def settle(self) -> None:
        """Wait for a stream that was left in the middle: it shares the buffer of all reads."""
        if self._upcoming is not None:
            wait([self._upcoming])

    def close(self) -> None:
        """Stop the threads that read."""
        self._landed.close()
        self._ahead.shutdown(cancel_futures=True)

    # --- inside ----------------------------------------------------------------------------

    def _end(self, entry: LayerStep) -> None:
        self._counters.hot_rows_read += entry.hot_rows
        self._counters.cold_rows_read += entry.cold_rows
        self._counters.drive_wait_seconds += entry.wait_seconds
        self._layer_hits.add(entry)
        self._pools.when_settled(entry.layer, lambda: self._observe(entry))

    def _arrived(
        self,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        landed: LandedRows | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which positions landed and which are on the drive alone, and add addresses."""
        (cold,) = (addresses == 0).nonzero()
        if landed is None:
            return cold[:0], cold
        came = landed.among(positions[cold])
        arrived = cold[came]
        places = landed.places_of(positions[arrived])
        addresses[arrived] = row_addresses(self._landed.rows, places)
        return arrived, cold[~came]

    def _read_ahead(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        wanted: list[NDArray[np.int64]],
    ) -> Iterator[tuple[int, tuple[int, _Gathered] | None]]:
        """Yield the number of each run and, where it wants rows of the drive, the buffer's."""
        turn = [number for number, own in enumerate(wanted) if len(own)]
        self.settle()

        def read(i: int) -> _Gathered:
            own = sequence.rows(positions[wanted[turn[i]]])
            self._wait_promoted(i % 2)
            out, places = self._buffers[i % 2][: len(own)], np.arange(len(own))
            return _Gathered(out, places, self._store.read_rows(layer, own, out, places))

        if not turn:
            yield from ((number, None) for number in range(len(wanted)))
            return
        upcoming: Future[_Gathered] | None
        is_demanding = False
        try:
            self._store.demand()
            is_demanding = True
            upcoming = self._upcoming = self._ahead.submit(read, 0)
            for number in range(len(wanted)):
                if upcoming is None or not len(wanted[number]):
                    yield number, None
                    continue
                i = turn.index(number)
                gathered = upcoming.result()
                upcoming = self._upcoming = (
                    self._ahead.submit(read, i + 1) if i + 1 < len(turn) else None
                )
                yield number, (i % 2, gathered)
        finally:
            if is_demanding:
                self._store.satisfy()

    def _blocks(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        landed: LandedRows | None = None,
    ) -> Iterator[tuple[int, NDArray[np.int64], _Gathered]]:
        starts = range(0, len(positions), self._block_rows)
        blocks = [positions[start : start + self._block_rows] for start in starts]
        if not blocks:
            return
        # A stream that was left in the middle may still be gathering into these buffers.
        self.settle()

        def gather(i: int) -> _Gathered:
            return self._gather(layer, sequence, blocks[i], i % 2, landed)

        gathered = gather(0)
        for i, block in enumerate(blocks):
            upcoming = self._upcoming = (
                self._ahead.submit(gather, i + 1) if i + 1 < len(blocks) else None
            )
            try:
                # Rows may be promoted meanwhile: this step's hot rows keep their slots.
                yield i % 2, block, gathered
            finally:
                if upcoming is not None:
                    gathered = upcoming.result()

    def _gather(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        which: int,
        landed: LandedRows | None,
    ) -> _Gathered:
        """Copy rows into a buffer and return it and which of them came from the drive."""
        self._wait_promoted(which)
        out = self._buffers[which][: len(positions)]
        held = sequence.held_starts[layer]
        settled = int(np.searchsorted(positions, held))
        out[settled:] = sequence.tails[layer][positions[settled:] - held]
        rows = sequence.rows(positions[:settled])
        slots = self._pools.layers[layer].slots(rows)
        hot = np.flatnonzero(slots >= 0)
        self._pools.layers[layer].copy_out(slots[hot], out, hot)
        cold = np.flatnonzero(slots < 0)
        rest = cold
        if landed is not None:
            came = landed.among(positions[cold])
            arrived, rest = cold[came], cold[~came]
            out[arrived] = self._landed.rows[landed.places_of(positions[arrived])]
        return _Gathered(out, cold, self._store.read_rows(layer, rows[rest], out, rest))

    def _wait_promoted(self, which: int) -> None:
        promoting, self._promoting[which] = self._promoting[which], None
        if promoting is not None:
            wait([promoting])


def _note_reads(entry: LayerStep, cost: ReadCost) -> None:
    entry.reads += cost.reads
    entry.read_bytes += cost.byte_count


def _runs(
    count: int, rest: NDArray[np.int64], tile_rows: int, most: int
) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Cut so many rows at multiples of a tile, so that no run wants more than `most` of `rest`.

    Returns the start and stop of each run, and what it wants.
    """
    if count and len(rest) <= most:
        return [(0, count, rest)]
    ends = np.append(np.arange(tile_rows, count, tile_rows), count)
    wanted = np.searchsorted(rest, ends)
    runs, start, taken = [], 0, 0
    while start < count:
        last = int(np.searchsorted(wanted, taken + most, side="right")) - 1
        stop, upto = int(ends[last]), int(wanted[last])
        runs.append((start, stop, rest[taken:upto]))
        start, taken = stop, upto
    return runs
