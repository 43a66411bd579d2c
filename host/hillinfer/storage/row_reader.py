# SPDX-License-Identifier: Apache-2.0
"""Brings rows together, wherever they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.layer_step import LayerStep
from hillinfer.pools.pool_keeper import PoolKeeper
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.sequence import Sequence

_Gathered = tuple[NDArray[np.uint8], NDArray[np.int64]]


class RowReader:
    """Gathers rows by position from tail, hot pool and drive, in blocks of a fixed size.

    The next block is gathered while the caller computes on the one before, and cold rows are
    promoted from a block's buffer meanwhile.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    keeper
        Promotes rows that were read.
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
        self._buffers = [
            aligned_buffer(block_rows * row_bytes)[: block_rows * row_bytes].reshape(-1, row_bytes)
            for _ in range(2)
        ]
        self._promoting: list[Future[tuple[int, int]] | None] = [None, None]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-gather")
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
        for _, _, (rows, _) in self._blocks(layer, sequence, positions):
            yield rows

    def fetch(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield blocks of selected positions and their rows, and promote those that were cold.

        Parameters as in `stream`; `step` is the decode step, which hot rows are stamped with.
        """
        self._keeper.begin_reading(layer, sequence, positions, step)
        entry = LayerStep(step, layer, sequence.lengths[layer])
        reads, read_bytes = self._counters.cold_reads, self._counters.cold_read_bytes
        started = time.perf_counter()
        for which, block, (rows, cold) in self._blocks(layer, sequence, positions):
            entry.wait_seconds += time.perf_counter() - started
            entry.hot_rows += len(block) - len(cold)
            entry.cold_rows += len(cold)
            if len(cold):
                self._promoting[which] = self._keeper.offer_read(
                    entry, sequence, block[cold], rows, cold
                )
            yield block, rows
            started = time.perf_counter()
        self._counters.hot_rows_read += entry.hot_rows
        self._counters.cold_rows_read += entry.cold_rows
        self._layer_hits.add(entry)
        entry.reads = self._counters.cold_reads - reads
        entry.read_bytes = self._counters.cold_read_bytes - read_bytes
        self._pools.when_settled(layer, lambda: self._observe(entry))

    def settle(self) -> None:
        """Wait for a stream that was left in the middle: it shares the buffer of all reads."""
        if self._upcoming is not None:
            wait([self._upcoming])

    def close(self) -> None:
        """Stop the gathering thread."""
        self._ahead.shutdown(cancel_futures=True)

    def _blocks(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], _Gathered]]:
        starts = range(0, len(positions), self._block_rows)
        blocks = [positions[start : start + self._block_rows] for start in starts]
        if not blocks:
            return
        # A stream that was left in the middle may still be gathering into these buffers.
        if self._upcoming is not None:
            wait([self._upcoming])
        gathered = self._gather(layer, sequence, blocks[0], 0)
        for i, block in enumerate(blocks):
            upcoming = self._upcoming = (
                self._ahead.submit(self._gather, layer, sequence, blocks[i + 1], (i + 1) % 2)
                if i + 1 < len(blocks)
                else None
            )
            try:
                # Rows may be promoted meanwhile: this step's hot rows keep their slots.
                yield i % 2, block, gathered
            finally:
                if upcoming is not None:
                    gathered = upcoming.result()

    def _gather(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], which: int
    ) -> _Gathered:
        """Copy rows into a buffer and return it and which of them came from the drive."""
        promoting, self._promoting[which] = self._promoting[which], None
        if promoting is not None:
            wait([promoting])
        out = self._buffers[which][: len(positions)]
        tail_start = sequence.tail_start(layer)
        settled = int(np.searchsorted(positions, tail_start))
        out[settled:] = sequence.tails[layer][positions[settled:] - tail_start]
        rows = sequence.rows(positions[:settled])
        slots = self._pools.layers[layer].slots(rows)
        hot = np.flatnonzero(slots >= 0)
        self._pools.layers[layer].copy_out(slots[hot], out, hot)
        cold = np.flatnonzero(slots < 0)
        self._store.read_rows(layer, rows[cold], out, cold)
        return out, cold
