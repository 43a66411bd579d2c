# SPDX-License-Identifier: Apache-2.0
"""Brings rows together, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.pools.hot_pools import HotPools
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.sequence import Sequence


class RowReader:
    """Gathers rows by position from tail, hot pool and drive, in blocks of a fixed size.

    The next block is gathered while the caller computes on the one before.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    block_rows, row_bytes
        Size of a block.
    counters
        Where hot and cold rows are counted.
    """

    def __init__(
        self,
        store: ColdStore,
        pools: HotPools,
        block_rows: int,
        row_bytes: int,
        counters: Counters,
    ) -> None:
        self._store = store
        self._pools = pools
        self._block_rows = block_rows
        self._counters = counters
        self._buffers = [
            aligned_buffer(block_rows * row_bytes)[: block_rows * row_bytes].reshape(-1, row_bytes)
            for _ in range(2)
        ]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-gather")
        self._upcoming: Future[NDArray[np.int64]] | None = None

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
        for _, rows, _ in self._blocks(layer, sequence, positions):
            yield rows

    def fetch(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64], step: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield blocks of selected positions and their rows, and promote those that were cold.

        Parameters as in `stream`; `step` is the decode step, which hot rows are stamped with.
        """
        settled = positions[positions < sequence.tail_start(layer)]
        pool = self._pools.layers[layer]
        slots = pool.slots(sequence.rows(settled))
        pool.touch(slots[slots >= 0], step)
        for block, rows, cold in self._blocks(layer, sequence, positions):
            self._counters.hot_rows_read += len(block) - len(cold)
            self._counters.cold_rows_read += len(cold)
            yield block, rows
            if len(cold):
                self._pools.admit(layer, sequence.rows(block[cold]), rows[cold], step)

    def close(self) -> None:
        """Stop the gathering thread."""
        self._ahead.shutdown(cancel_futures=True)

    def _blocks(
        self, layer: int, sequence: Sequence, positions: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]]:
        starts = range(0, len(positions), self._block_rows)
        blocks = [positions[start : start + self._block_rows] for start in starts]
        if not blocks:
            return
        # A stream that was left in the middle may still be gathering into these buffers.
        if self._upcoming is not None:
            wait([self._upcoming])
        cold = self._gather(layer, sequence, blocks[0], self._buffers[0])
        for i, block in enumerate(blocks):
            upcoming = self._upcoming = (
                self._ahead.submit(
                    self._gather, layer, sequence, blocks[i + 1], self._buffers[(i + 1) % 2]
                )
                if i + 1 < len(blocks)
                else None
            )
            try:
                # The consumer may promote rows meanwhile: this step's hot rows keep their slots.
                yield block, self._buffers[i % 2][: len(block)], cold
            finally:
                if upcoming is not None:
                    cold = upcoming.result()

    def _gather(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> NDArray[np.int64]:
        """Copy rows into `out` and return which of them came from the drive."""
        tail_start = sequence.tail_start(layer)
        settled = int(np.searchsorted(positions, tail_start))
        out[settled : len(positions)] = sequence.tails[layer][positions[settled:] - tail_start]
        rows = sequence.rows(positions[:settled])
        slots = self._pools.layers[layer].slots(rows)
        hot = np.flatnonzero(slots >= 0)
        self._pools.layers[layer].copy_out(slots[hot], out, hot)
        cold = np.flatnonzero(slots < 0)
        self._store.read_rows(layer, rows[cold], out, cold)
        return cold
