# SPDX-License-Identifier: Apache-2.0
"""Gets rows by position, wherever they lie: the one way from a selection to its bytes.

Every set of rows has one life. It is *located*: each row has an address in the open group or a hot
pool, or is cold. Cold rows that were read ahead have *landed* in the prefetch buffer. The rest is
*planned* as runs of consecutive positions, each *read* on demand while the caller looks at the run
before. Cold rows are *promoted* from where they landed, and their memory is *released* after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.landing import RowBuffers, WantedRows
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import LayerStepLog, PoolManager, RowLife, SelectedLife
from hillinfer.kv.prefetch_buffer import LandedRows, PrefetchBuffer
from hillinfer.kv.sequence import Sequence
from hillinfer.native.library import native_library
from hillinfer.native.structures import row_addresses
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import LayerStep, ReadCost
from hillinfer_model.kernel_spec import GROUP_TOKENS

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Run:
    """Consecutive positions of a set, and what of them is read on demand, and where to.

    Parameters
    ----------
    start
        Number of the first position in the set.
    addresses
        uint64, where each row lies; those that are read get theirs then.
    wanted
        int64, which of the addresses are of rows to be read.
    rows
        int64, their row numbers.
    places
        int64, which rows of a buffer they become.
    used
        Rows of a buffer that it takes; with none it needs no buffer.
    """

    start: int
    addresses: NDArray[np.uint64]
    wanted: NDArray[np.int64]
    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    used: int


@dataclass(frozen=True)
class _Filled:
    """A buffer with the rows of a run, and what reading them took."""

    buffer: NDArray[np.uint8]
    cost: ReadCost


class Gather:
    """Brings selected rows together, in place or as copies, and streams rows to whoever asks.

    Parameters
    ----------
    buffers
        Where rows go that are read on demand, and copies.
    block_rows
        Most rows of a block of copies.
    """

    def __init__(
        self,
        store: ColdStore,
        pools: HotPools,
        manager: PoolManager,
        prefetch: PrefetchBuffer,
        buffers: RowBuffers,
        block_rows: int,
        counters: Counters,
        log: LayerStepLog,
    ) -> None:
        self._store = store
        self._pools = pools
        self._manager = manager
        self._prefetch = prefetch
        self._buffers = buffers
        self._block_rows = block_rows
        self._counters = counters
        self._log = log

    # --- rows of a selection ---------------------------------------------------------------

    def in_place(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None,
    ) -> Generator[NDArray[np.uint64], None, None]:
        """Yield the addresses of selected rows where they lie, and promote those that were cold.

        Parameters
        ----------
        positions
            int64 logical positions, ascending.
        step
            The decode step, which hot rows are stamped with.
        landed
            What of them `land` has read; given up here.

        Yields
        ------
        uint64 addresses of consecutive runs of the positions, valid until the next. All runs but
        the last are multiples of 64.
        """

        def cut(found: NDArray[np.uint64], rest: NDArray[np.int64]) -> Iterator[_Run]:
            most = self._buffers.rows
            for start, stop, own in tile_runs(len(positions), rest, GROUP_TOKENS, most):
                rows = sequence.rows(positions[own])
                places = np.arange(len(own))
                yield _Run(start, found[start:stop], own - start, rows, places, len(own))

        for run, _ in self._selected(layer, sequence, positions, step, landed, cut):
            yield run.addresses

    def copied(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None = None,
    ) -> Generator[tuple[NDArray[np.int64], NDArray[np.uint8]], None, None]:
        """Yield blocks of selected positions and copies of their rows, valid until the next.

        Parameters as in `in_place`; rows that were cold are promoted likewise.
        """

        def cut(found: NDArray[np.uint64], rest: NDArray[np.int64]) -> Iterator[_Run]:
            for block in self._blocks(len(positions)):
                first, last = rest.searchsorted((block.start, block.stop))
                own = rest[first:last] - block.start
                rows = sequence.rows(positions[rest[first:last]])
                yield _Run(block.start, found[block], own, rows, own, len(found[block]))

        for run, buffer in self._selected(layer, sequence, positions, step, landed, cut):
            assert buffer is not None
            yield positions[run.start : run.start + len(run.addresses)], _together(run, buffer)

    # --- rows that nobody selected ---------------------------------------------------------

    def stream(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> Generator[NDArray[np.uint8], None, None]:
        """Yield blocks of copies of rows, uint8 (at most block_rows, row_bytes).

        Each is valid until the next. Nothing is promoted and no hit is counted.

        Parameters
        ----------
        positions
            int64 logical positions, ascending.
        """
        for one, buffer, _ in self._streamed(layer, sequence, positions, None):
            yield _together(one, buffer)

    def bring(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        landed: LandedRows | None = None,
    ) -> Generator[NDArray[np.uint8], None, None]:
        """Yield what `stream` does; rows that were cold become hot where pools have room.

        `landed` is what `land` has read of them ahead; it is given up here.
        """
        with self._manager.seeing(layer, sequence) as offer:
            for one, buffer, which in self._streamed(layer, sequence, positions, landed):
                rows = _together(one, buffer)
                own = positions[one.start : one.start + len(rows)]
                if (offered := offer(own, rows)) is not None:
                    self._buffers.lend(which, offered)
                yield rows

    def stream_in_place(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> Generator[NDArray[np.uint64], None, None]:
        """Yield addresses of what `stream` yields copies of, uint64; parameters as there."""
        for one, _, _ in self._streamed(layer, sequence, positions, None):
            yield one.addresses

    def _streamed(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        landed: LandedRows | None,
    ) -> Generator[tuple[_Run, NDArray[np.uint8], int], None, None]:
        def runs() -> Iterator[_Run]:
            # Looked for block by block: the addresses of a long context would take memory.
            for block in self._blocks(len(positions)):
                own = positions[block]
                # What `bring` has offered of blocks before is hot, or is not, by now.
                self._pools.settle(layer)
                found = self._pools.layers[layer].find(layer, sequence, own)
                self._add_landed(own, found, landed)
                cold = np.flatnonzero(found == 0)
                yield _Run(block.start, found, cold, sequence.rows(own[cold]), cold, len(own))

        started = time.perf_counter()
        with RowLife(self._prefetch, landed) as life:
            cost = life.arrive()
            if landed is not None:
                sequence.count_reads(cost.reads, cost.byte_count, len(landed.positions))
            for run, filled, which in self._read_in_turn(layer, runs()):
                self._counters.drive_wait_seconds += time.perf_counter() - started
                assert filled is not None
                sequence.count_reads(filled.cost.reads, filled.cost.byte_count, len(run.wanted))
                yield run, filled.buffer, which
                started = time.perf_counter()

    def from_drive(
        self, layer: int, sequence: Sequence, start: int, stop: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield rows of full groups as the drive has them, valid until the next; any thread may.

        Parameters
        ----------
        start, stop
            Positions of the first one and behind the last one.
        """
        rows = np.empty((GROUP_TOKENS, self._buffers.row_bytes), np.uint8)
        for first in range(start, stop, GROUP_TOKENS):
            positions = np.arange(first, min(first + GROUP_TOKENS, stop))
            own, places = rows[: len(positions)], np.arange(len(positions))
            self._store.read_rows(WantedRows(layer, sequence.rows(positions), own, places))
            yield own

    # --- rows that a layer will want -------------------------------------------------------

    def land(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], on_drive: int
    ) -> LandedRows | None:
        """Begin to read the cold rows of a selection, in blocks as they become free.

        Called while the thread that attends is at an earlier layer: what is hot may have changed
        when `in_place` looks again, so nothing depends on it but time.

        Parameters
        ----------
        positions
            int64, ascending.
        on_drive
            Rows from this position on are not to be read: they are in the tail.

        Returns
        -------
        What lands where, or None where nothing does.
        """
        self._pools.wait_for(layer)
        rows = sequence.rows(settled := positions[: np.searchsorted(positions, on_drive)])
        cold = np.flatnonzero(self._pools.layers[layer].slots(rows) < 0)
        return self._prefetch.begin(layer, settled[cold], rows[cold])

    def copy_held(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        on_drive: int,
        landed: LandedRows | None,
        out: NDArray[np.uint8],
    ) -> NDArray[np.int64]:
        """Copy those rows that are in memory, for whoever sends them on before attention asks.

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
        addresses = np.zeros(len(positions), np.uint64)
        # Nothing gives hot rows up meanwhile: what the attention of another sequence has offered is
        # promoted by then, and nobody offers more.
        self._pools.wait_for(layer)
        with self._pools.attending:
            self._pools.wait_for(layer)
            pool = self._pools.layers[layer]
            slots = pool.slots(sequence.rows(positions[:settled]))
            (hot,) = (slots >= 0).nonzero()
            addresses[hot] = pool.addresses(slots[hot])
            in_tail = positions[settled:] - on_drive
            addresses[settled:] = row_addresses(sequence.tails[layer], in_tail)
            self._add_landed(positions, addresses, landed)
            native_library().copy_rows(addresses[held := np.flatnonzero(addresses)], out)
        return held

    # --- inside ----------------------------------------------------------------------------

    def _selected(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None,
        cut: Callable[[NDArray[np.uint64], NDArray[np.int64]], Iterable[_Run]],
    ) -> Iterator[tuple[_Run, NDArray[np.uint8] | None]]:
        """Live the life of a selected set; yield its runs with all addresses, and their buffers.

        Parameters
        ----------
        layer, sequence, positions, step, landed
            As in `in_place`.
        cut
            Returns runs, given all addresses and which positions are to be read on demand.
        """
        self._pools.settle(layer)
        with self._pools.attending:
            addresses = self._manager.begin_in_place(layer, sequence, positions, step)
            entry = LayerStep(step, layer, sequence.lengths[layer])
            with SelectedLife(self._prefetch, landed, self._pools, entry) as life:
                life.arrive()
                started = time.perf_counter()
                arrived, places = self._add_landed(positions, addresses, landed)
                (rest,) = (addresses == 0).nonzero()
                entry.cold_rows = len(arrived) + len(rest)
                entry.hot_rows = len(positions) - entry.cold_rows
                if len(arrived):
                    given = entry, sequence, positions[arrived], self._prefetch.rows, places
                    life.promote(self._manager.offer_read(*given))
                for run, filled, which in self._read_in_turn(layer, cut(addresses, rest)):
                    if filled is not None:
                        entry.note_reads(filled.cost)
                        if len(run.wanted):
                            own = positions[run.start + run.wanted]
                            given = entry, sequence, own, filled.buffer, run.places
                            self._buffers.lend(which, self._manager.offer_read(*given))
                    entry.wait_seconds += time.perf_counter() - started
                    yield run, None if filled is None else filled.buffer
                    started = time.perf_counter()
        self._log.end(entry, sequence)

    def _add_landed(
        self,
        positions: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        landed: LandedRows | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give rows that landed their addresses; return which of the positions, and their places.

        Those that were hot already stay where they are.
        """
        if landed is None:
            return _NO_ROWS, _NO_ROWS
        (cold,) = (addresses == 0).nonzero()
        arrived = cold[landed.among(positions[cold])]
        places = landed.places_of(positions[arrived])
        addresses[arrived] = row_addresses(self._prefetch.rows, places)
        return arrived, places

    def _blocks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._block_rows):
            yield slice(start, min(start + self._block_rows, count))

    def _read_in_turn(
        self, layer: int, runs: Iterable[_Run]
    ) -> Iterator[tuple[_Run, _Filled | None, int]]:
        """Yield each run with its addresses, its buffer or None, and which buffer that is.

        While the caller looks at a run the next one that wants rows of the drive is read.
        """
        self._buffers.settle()
        coming = iter(runs)
        waiting = [next(coming, None)]
        # Between the reads of one set nothing is read ahead.
        is_demanding = False
        turn = 0
        reading: Future[_Filled] | None = None
        try:
            while (run := waiting.pop()) is not None:
                filled, which = None, turn % 2
                if len(run.rows):
                    if not is_demanding:
                        self._store.turns.demand()
                        is_demanding = True
                    # Nobody computes beside the first one, so no other thread need wake for it.
                    read = self._reader(layer, run, which) if reading is None else reading.result
                    filled, reading = read(), None
                    run.addresses[run.wanted] = row_addresses(filled.buffer, run.places)
                elif run.used:
                    filled = _Filled(self._buffers.take(which, run.used), ReadCost())
                turn += filled is not None
                following = next(coming, None)
                if following is not None and len(following.rows):
                    reading = self._buffers.begin(self._reader(layer, following, turn % 2))
                waiting.append(following)
                yield run, filled, which
        finally:
            if is_demanding:
                self._store.turns.satisfy()

    def _reader(self, layer: int, run: _Run, which: int) -> Callable[[], _Filled]:
        def read() -> _Filled:
            buffer = self._buffers.take(which, run.used)
            wanted = WantedRows(layer, run.rows, buffer, run.places)
            return _Filled(buffer, self._store.read_rows(wanted))

        return read


def tile_runs(
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


def _together(run: _Run, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a buffer with all rows of a run, of which it has those that were read."""
    native_library().copy_rows(run.addresses, buffer)
    return buffer
