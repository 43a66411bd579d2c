# SPDX-License-Identifier: Apache-2.0
"""Cold rows read before the layer that wants them begins, from the first read to the last look."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.cold_store import ColdStore
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.landing_area import BlockState, LandingArea
from hillinfer.storage.read_cost import ReadCost
from hillinfer.storage.wanted_rows import WantedRows


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
        self._is_closed = False
        # What landed and no attention has taken over, in the order in which it is read.
        self._unclaimed: list[LandedRows] = []
        self._beginning = threading.Lock()

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All that landed, uint8 of shape (any, row_bytes), by the places that `LandedRows` has."""
        return self._landing.rows

    def states(self) -> list[BlockState]:
        """Return the state of every block that rows land in."""
        return self._landing.states()

    def begin(
        self, layer: int, positions: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> LandedRows | None:
        """Begin to read cold rows, and go on as blocks become free until attention wants them.

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
        if not len(rows) or not self._landing.blocks:
            return None
        landed = LandedRows(Future())
        # Noted first: an interrupt must not leave a reading that nobody knows of.
        with self._beginning:
            self._unclaimed.append(landed)
            try:
                self._reading.submit(self._land, landed, layer, positions, rows)
            except RuntimeError:
                # The system starts no thread. Should one come later, it is not to read this.
                landed.reading.cancel()
                self._unclaimed.remove(landed)
                raise
        return landed

    def want(self, landed: LandedRows | None) -> None:
        """Let nothing wait for room any more that was begun no later than this.

        What stands before it in line must not wait either: blocks may become free only when
        attention goes on.
        """
        if landed is None or landed.is_wanted:
            return
        for earlier in self._unclaimed[: self._unclaimed.index(landed) + 1]:
            earlier.is_wanted = True
        self._landing.wake()

    def claim(self, landed: LandedRows | None) -> None:
        """Take over what landed; `let_go` must follow."""
        self.want(landed)
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
        # Blocks that something went wrong with are free already.
        wait([landed.reading])
        if promoting is None:
            self._give(landed)
        else:
            # Also called where it is cancelled.
            promoting.add_done_callback(lambda _: self._give(landed))

    def abandon_unclaimed(self) -> None:
        """Free what landed for attention that did not come; nothing is being announced."""
        while self._unclaimed:
            landed = self._unclaimed[-1]
            # Its turn may never come: an interrupt may have come before it stood in line.
            if not landed.reading.cancel():
                self.want(landed)
                # An interrupt may have come between a note that it is wanted and the call.
                self._landing.wake()
                self.let_go(landed)
            self._unclaimed.remove(landed)

    def close(self) -> None:
        """Stop the thread that reads; what it has begun ends with what it has read."""
        self._is_closed = True
        self._landing.wake()
        self._reading.shutdown()

    def _land(
        self,
        landed: LandedRows,
        layer: int,
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        if not landed.reading.set_running_or_notify_cancel():
            return
        cost, done = ReadCost(), 0
        try:
            while done < len(rows) and not self._is_closed:
                blocks = self._landing.take(len(rows) - done)
                if blocks:
                    part = slice(done, done + len(blocks) * self._landing.block_rows)
                    cost += self._fill(landed, layer, blocks, positions[part], rows[part])
                    done = part.stop
                elif self._is_wanted(landed):
                    break
                else:
                    self._landing.wait_for_room(lambda: self._is_wanted(landed))
        except BaseException as error:
            # Whoever attends is told.
            landed.reading.set_exception(error)
            return
        landed.reading.set_result(cost)

    def _is_wanted(self, landed: LandedRows) -> bool:
        return landed.is_wanted or self._is_closed

    def _fill(
        self,
        landed: LandedRows,
        layer: int,
        blocks: list[int],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> ReadCost:
        try:
            places = self._landing.places(blocks, len(rows))
            wanted = WantedRows(layer, rows, self._landing.rows, places)
            cost = self._store.read_rows_ahead(wanted)
        except BaseException:
            for block in blocks:
                self._landing.abandon(block)
            raise
        for block in blocks:
            self._landing.ready(block)
        landed.add(blocks, positions, places)
        return cost

    def _give(self, landed: LandedRows) -> None:
        # Each once, wherever an interrupt comes.
        while landed.blocks:
            self._landing.give(landed.blocks.pop())
