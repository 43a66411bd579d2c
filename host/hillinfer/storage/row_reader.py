# SPDX-License-Identifier: Apache-2.0
"""Brings rows together, wherever they lie."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_step import LayerStep
from hillinfer.pools.layer_step_log import LayerStepLog
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.gathered_rows import GatheredRows
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.row_buffers import RowBuffers
from hillinfer.storage.rows_ahead import RowsAhead
from hillinfer.storage.sequence import Sequence
from hillinfer.storage.wanted_rows import WantedRows
from hillinfer_model.kernel_spec import GROUP_TOKENS


class RowReader:
    """Gathers rows by position from tail, hot pool, landing area and the drive.

    Cold rows may be read ahead (`land`); what was not is read in blocks of a fixed size, the next
    one while the caller computes on the one before. Cold rows are promoted from where they landed
    meanwhile. Where attention reads rows in place, `RowLocator` says where they lie.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    keeper
        Promotes rows that were read.
    landed
        Reads rows ahead.
    buffers
        Where rows are gathered.
    block_rows
        Most rows of a block.
    counters
        Where waits are counted.
    log
        Takes the entry of each layer and step.
    """

    def __init__(
        self,
        store: ColdStore,
        pools: HotPools,
        keeper: PoolKeeper,
        landed: RowsAhead,
        buffers: RowBuffers,
        block_rows: int,
        counters: Counters,
        log: LayerStepLog,
    ) -> None:
        self._store = store
        self._pools = pools
        self._keeper = keeper
        self._landed = landed
        self._buffers = buffers
        self._block_rows = block_rows
        self._counters = counters
        self._log = log

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
        rows = np.empty((GROUP_TOKENS, self._buffers.row_bytes), np.uint8)
        for first in range(start, stop, GROUP_TOKENS):
            positions = np.arange(first, min(first + GROUP_TOKENS, stop))
            own, places = rows[: len(positions)], np.arange(len(positions))
            self._store.read_rows(WantedRows(layer, sequence.rows(positions), own, places))
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
                entry.note_reads(self._landed.arrive(landed))
                blocks = self._blocks(layer, sequence, positions, landed)
                for which, block, gathered in blocks:
                    rows, cold = gathered.rows, gathered.cold
                    entry.note_reads(gathered.cost)
                    entry.hot_rows += len(block) - len(cold)
                    entry.cold_rows += len(cold)
                    if len(cold):
                        promoting = self._keeper.offer_read(
                            entry, sequence, block[cold], rows, cold
                        )
                        self._buffers.lend(which, promoting)
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
        self._log.end(entry)

    def _blocks(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        landed: LandedRows | None = None,
    ) -> Iterator[tuple[int, NDArray[np.int64], GatheredRows]]:
        starts = range(0, len(positions), self._block_rows)
        blocks = [positions[start : start + self._block_rows] for start in starts]
        if not blocks:
            return
        # A stream that was left in the middle may still be gathering into these buffers.
        self._buffers.settle()

        def gather(i: int) -> GatheredRows:
            return self._gather(layer, sequence, blocks[i], i % 2, landed)

        gathered = gather(0)
        for i, block in enumerate(blocks):
            upcoming = self._buffers.begin(gather, i + 1, len(blocks))
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
    ) -> GatheredRows:
        """Copy rows into a buffer and return it and which of them came from the drive."""
        out = self._buffers.take(which, len(positions))
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
        wanted = WantedRows(layer, rows[rest], out, rest)
        return GatheredRows(out, cold, self._store.read_rows(wanted))
