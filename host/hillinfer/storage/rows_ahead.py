# SPDX-License-Identifier: Apache-2.0
"""Cold rows read before the layer that wants them begins, from the first read to the last look."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.landing_area import LandingArea
from hillinfer.storage.read_cost import ReadCost


class RowsAhead:
    """Fills blocks of the landing area and frees each when nobody looks at it any more.

    Parameters
    ----------
    store
        Where rows are read.
    landing
        Where they land.
    """

    def __init__(self, store: ColdStore, landing: LandingArea) -> None:
        self._store = store
        self._landing = landing
        # One of its own: reads on demand must not wait in line behind it.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-land")
        # What landed and no attention has taken over.
        self._unclaimed: list[LandedRows] = []

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All that landed, uint8 of shape (any, row_bytes), by the places that `LandedRows` has."""
        return self._landing.rows

    def begin(
        self, layer: int, positions: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> LandedRows | None:
        """Begin to read cold rows, as many as there are free blocks for.

        Parameters
        ----------
        layer
            Whose.
        positions, rows
            int64 positions, ascending, and their row numbers.

        Returns
        -------
        What lands where, or None where nothing does.
        """
        blocks = self._landing.take(len(rows))
        if not blocks:
            return None
        count = min(len(rows), len(blocks) * self._landing.block_rows)
        places = self._landing.places(blocks, count)
        reading = self._reading.submit(self._fill, layer, rows[:count], places, blocks)
        landed = LandedRows(positions[:count], places, blocks, reading)
        self._unclaimed.append(landed)
        return landed

    def claim(self, landed: LandedRows | None) -> None:
        """Take over what landed; `let_go` must follow."""
        if landed is not None:
            self._unclaimed.remove(landed)

    def arrive(self, landed: LandedRows | None) -> ReadCost:
        """Wait until it is there, and begin to look at it.

        Raises
        ------
        ColdPoolError
            What went wrong while reading.
        """
        if landed is None:
            return ReadCost()
        cost = landed.reading.result()
        for block in landed.blocks:
            self._landing.use(block)
        return cost

    def let_go(
        self, landed: LandedRows | None, promoting: Future[tuple[int, int]] | None = None
    ) -> None:
        """Free what landed, once it is there and a promotion looks at it no more."""
        if landed is None:
            return
        wait([landed.reading])
        # What went wrong while reading freed the blocks.
        if landed.reading.cancelled() or landed.reading.exception() is not None:
            return
        if promoting is None:
            self._give(landed)
        else:
            # Also called where it is cancelled.
            promoting.add_done_callback(lambda _: self._give(landed))

    def abandon_unclaimed(self) -> None:
        """Free what landed for attention that did not come; nothing is being announced."""
        while self._unclaimed:
            landed = self._unclaimed[0]
            self.let_go(landed)
            self._unclaimed.remove(landed)

    def close(self) -> None:
        """Stop the thread that reads."""
        self._reading.shutdown(cancel_futures=True)

    def _fill(
        self, layer: int, rows: NDArray[np.int64], places: NDArray[np.int64], blocks: list[int]
    ) -> ReadCost:
        try:
            cost = self._store.read_rows_ahead(layer, rows, self._landing.rows, places)
        except BaseException:
            for block in blocks:
                self._landing.abandon(block)
            raise
        for block in blocks:
            self._landing.ready(block)
        return cost

    def _give(self, landed: LandedRows) -> None:
        for block in landed.blocks:
            self._landing.give(block)
