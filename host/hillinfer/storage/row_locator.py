# SPDX-License-Identifier: Apache-2.0
"""Tells where selected rows lie in memory, for attention that reads them in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.addresses import row_addresses
from hillinfer.native.structures import Places
from hillinfer.pools.hot_pool import Attended
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

T = TypeVar("T")


class RowLocator:
    """Finds selected rows in tail, hot pool and landing area, and reads the rest to a buffer.

    Cold rows are promoted meanwhile from where they landed.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    keeper
        Promotes rows that were read.
    landed
        Has read rows ahead.
    buffers
        Where the others go.
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
        log: LayerStepLog,
    ) -> None:
        self._store = store
        self._pools = pools
        self._keeper = keeper
        self._landed = landed
        self._buffers = buffers
        self._log = log

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
            As in `RowReader.fetch`; at least one position.
        attend
            Finds rows and attends to them if none of them is cold.

        Returns
        -------
        What `attend` made of them, or None, and addresses for `fetch_in_place`.
        """
        return self._keeper.attend_in_place(layer, sequence, positions, step, attend)

    def note_hot(self, layer: int, sequence: Sequence, step: int, rows: int) -> None:
        """Log that `attend_hot` attended to so many rows; called without `attending`."""
        self._log.end(LayerStep(step, layer, sequence.lengths[layer], rows))

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
            As in `RowReader.fetch`.
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
                entry.note_reads(self._landed.arrive(landed))
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
                runs = _runs(len(positions), rest, tile_rows, self._buffers.rows)
                wanted = [own for _, _, own in runs]
                for number, gathered in self._read_ahead(layer, sequence, positions, wanted):
                    start, stop, own = runs[number]
                    if gathered is not None:
                        which, from_drive = gathered
                        entry.note_reads(from_drive.cost)
                        addresses[own] = row_addresses(from_drive.rows, from_drive.cold)
                        own_promoting = self._keeper.offer_read(
                            entry, sequence, positions[own], from_drive.rows, from_drive.cold
                        )
                        self._buffers.lend(which, own_promoting)
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
        self._log.end(entry)

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
    ) -> Iterator[tuple[int, tuple[int, GatheredRows] | None]]:
        """Yield the number of each run and, where it wants rows of the drive, the buffer's."""
        turn = [number for number, own in enumerate(wanted) if len(own)]
        self._buffers.settle()

        def read(i: int) -> GatheredRows:
            own = sequence.rows(positions[wanted[turn[i]]])
            out, places = self._buffers.take(i % 2, len(own)), np.arange(len(own))
            drive = WantedRows(layer, own, out, places)
            return GatheredRows(out, places, self._store.read_rows(drive))

        if not turn:
            yield from ((number, None) for number in range(len(wanted)))
            return
        is_demanding = False
        try:
            self._store.demand()
            is_demanding = True
            upcoming = self._buffers.begin(read, 0, len(turn))
            for number in range(len(wanted)):
                if upcoming is None or not len(wanted[number]):
                    yield number, None
                    continue
                i = turn.index(number)
                gathered = upcoming.result()
                upcoming = self._buffers.begin(read, i + 1, len(turn))
                yield number, (i % 2, gathered)
        finally:
            if is_demanding:
                self._store.satisfy()


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
