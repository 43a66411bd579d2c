# SPDX-License-Identifier: Apache-2.0
"""Rows on the drive with a pool in memory, fetched ahead by a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer_bench.rivals.block_attention import Part, whole
from hillinfer_bench.rivals.drive_rows import DriveRows, Landing
from hillinfer_bench.rivals.rival import Meter, RivalSetup

# A unit's slot; a slot's unit and when it was used.
_UNIT_BYTES, _SLOT_BYTES = 4, 4 + 8


@dataclass(frozen=True)
class Fetched:
    """Where fetched units are: those found in the pool first, then those read.

    Parameters
    ----------
    order
        Index of each, in this order, in the units asked for.
    pool
        uint8 (rows, row_bytes), the pool of the layer and sequence.
    rows
        Which rows of it were asked for, int64.
    read
        uint8 (rows, row_bytes), what was read.
    is_last
        Whether nothing comes after it.
    """

    order: NDArray[np.int64]
    pool: NDArray[np.uint8]
    rows: NDArray[np.int64]
    read: NDArray[np.uint8]
    is_last: bool

    @property
    def parts(self) -> list[Part]:
        """The rows as parts of a batch to attend to."""
        return [(self.pool, self.rows), whole(self.read)]


class PooledRows:
    """Fetches units of rows, from the pool where they are and from the drive where not.

    A unit is one row, or as many as a page has. Every layer and sequence has a pool of the same
    size, from which the least recently used units give way.

    Parameters
    ----------
    setup
        Says how many layers and sequences.
    rows
        Where all units lie.
    unit_rows
        Rows of a unit, a power of two up to 64.
    meter
        Counts the pool, its tables and the buffer that reads go through.

    Attributes
    ----------
    place, owner
        Of each unit its slot, and of each slot its unit, int32, below 0 where there is none.
    """

    def __init__(self, setup: RivalSetup, rows: DriveRows, unit_rows: int, meter: Meter) -> None:
        self._setup = setup
        self._rows = rows
        self._meter = meter
        self.unit_bytes = unit_rows * rows.row_bytes
        self.units = rows.region_rows // unit_rows
        self._buffer = meter.buffer(rows.scatter_buffer_bytes(unit_rows))
        # One each: they are used from different threads.
        self._clocks = [[0] * setup.batch for _ in range(setup.shape.layers)]
        self.take_pool(0)

    def take_pool(self, byte_count: int) -> None:
        """Make pools with as many slots as the bytes have room for, tables included; once."""
        setup = self._setup
        each = byte_count // setup.units - _UNIT_BYTES * self.units
        self.slots = slots = max(0, min(each // (self.unit_bytes + _SLOT_BYTES), self.units))
        shape = setup.shape.layers, setup.batch
        data = self._meter.buffer(setup.units * slots * self.unit_bytes)
        self._data = data.reshape(*shape, slots, self.unit_bytes)
        self.place = self._table((*shape, self.units if slots else 0), np.int32)
        self.owner = self._table((*shape, slots), np.int32)
        # Free slots go first: nothing was used before 0.
        self._used = self._table((*shape, slots), np.int64)

    def pool_bytes(self, slots: int) -> int:
        """Return what pools of that many slots take, tables included."""
        return self._setup.units * (
            _UNIT_BYTES * self.units + slots * (self.unit_bytes + _SLOT_BYTES)
        )

    def fetch(
        self,
        layer: int,
        row: int,
        units: NDArray[np.int64],
        memory: Iterator[NDArray[np.uint8]],
    ) -> Iterator[Fetched]:
        """Find units in the pool and read the others, which are in the pool afterwards.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        units
            int64 numbers, ascending.
        memory
            Gives for each piece page-aligned uint8 (any, unit_bytes), a multiple of 64 rows, for
            those that are read.

        Yields
        ------
        Pieces full of what was read; at last the rest, and what was found, which is valid until
        the next call for this layer and sequence.
        """
        place, used = self.place[layer, row], self._used[layer, row]
        slots = place[units] if self.slots else np.full(len(units), -1)
        hits, misses = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        found = self._rows_of(slots[hits])
        if self.slots:
            used[slots[hits]] = self._ticks(layer, row, len(hits))
        pool = self._data[layer, row].reshape(-1, self._rows.row_bytes)
        # What was found must stay where it is. Where not all of the others fit, the last ones
        # stay: those of the newest tokens.
        first_kept = len(misses) - min(self.slots - len(hits), len(misses))
        at, is_last = 0, False
        while not is_last:
            out = next(memory)
            chunk = misses[at : at + len(out)]
            read = out[: len(chunk)]
            if len(chunk):
                self._rows.read_units(layer, row, units[chunk], read, self._buffer)
            kept = max(0, first_kept - at)
            if kept < len(chunk):
                self._keep(layer, row, units[chunk[kept:]], read[kept:])
            flat = read.reshape(-1, self._rows.row_bytes)
            at += len(chunk)
            is_last = at == len(misses)
            if is_last:
                yield Fetched(np.concatenate([hits, chunk]), pool, found, flat, is_last=True)
            else:
                yield Fetched(chunk, pool, found[:0], flat, is_last=False)

    def put(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep rows that leave the tail, the newest of them where not all fit.

        Not while anything of this layer and sequence is fetched: what was found might give way.
        Other layers and sequences may be.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        first
            Position of the first of them, at the start of a unit.
        rows
            uint8 (rows, row_bytes) of whole units.
        """
        data = rows.reshape(-1, self.unit_bytes)
        per_unit = self.unit_bytes // self._rows.row_bytes
        kept = min(len(data), self.slots)
        if kept:
            units = first // per_unit + np.arange(len(data))
            self._keep(layer, row, units[-kept:], data[-kept:])

    def _keep(
        self, layer: int, row: int, units: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        """Put units into the slots used longest ago."""
        place, used, owner = (part[layer, row] for part in (self.place, self._used, self.owner))
        victims = np.argpartition(used, len(units) - 1)[: len(units)]
        gone = owner[victims]
        place[gone[gone >= 0]] = -1
        owner[victims], place[units] = units, victims
        used[victims] = self._ticks(layer, row, len(units))
        self._data[layer, row, victims] = data

    def _rows_of(self, slots: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the rows of slots, in a pool seen as rows."""
        per_unit = self.unit_bytes // self._rows.row_bytes
        rows: NDArray[np.int64] = slots.astype(np.int64)[:, None] * per_unit + np.arange(per_unit)
        return rows.reshape(-1)

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._data = np.empty((0, 0, 0, 0), np.uint8)
        self.place = self.owner = self._used = np.empty((0, 0, 0), np.int64)
        self.slots = 0

    def _ticks(self, layer: int, row: int, count: int) -> NDArray[np.int64]:
        """Return times of use, each later than all before."""
        first = self._clocks[layer][row]
        self._clocks[layer][row] = first + count
        return np.arange(first, first + count)

    def _table(self, shape: tuple[int, ...], dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
        made = self._meter.array(shape, dtype)
        made[...] = -1
        return made


Source = Callable[[Iterator[NDArray[np.uint8]]], Iterator[Fetched]]


@dataclass(eq=False)
class Fetch:
    """One fetch, from its start to the last look at it; `FetchThread` alone changes it."""

    source: Iterator[Fetched]
    ready: deque[tuple[Fetched, int]] = field(default_factory=deque)
    looked_at: int | None = None
    failure: BaseException | None = None
    is_attending: bool = False
    is_over: bool = False


class FetchThread:
    """Makes the pieces of fetches in a thread, as many as there is room for.

    Those of the layer that attends come first, then those of others in the order of their starts.

    Parameters
    ----------
    landing
        Where pieces land; the caller closes it afterwards.
    """

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-rival")
        self._changed = threading.Condition()
        self._fetches: list[Fetch] = []
        # What the thread works on, and into which piece.
        self._current: tuple[Fetch, int] | None = None

    def start(self, source: Source) -> Fetch:
        """Begin to make pieces; `source` is given their memory, and run by the thread alone."""
        fetch = Fetch(source(self._memory()))
        with self._changed:
            self._fetches.append(fetch)
            self._go_on()
        return fetch

    def pieces(self, fetch: Fetch) -> Iterator[Fetched]:
        """Attend to a fetch: yield its pieces in order, each valid until the next is asked for."""
        try:
            with self._changed:
                # Attention that broke off may never let go of its own.
                for other in [other for other in self._fetches if other.is_attending]:
                    self.drop(other)
                fetch.is_attending = True
                self._go_on()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: fetch.ready or fetch.is_over)
                    if not fetch.ready:
                        break
                    fetched, fetch.looked_at = fetch.ready.popleft()
                yield fetched
                with self._changed:
                    self._let_go(fetch)
                    self._go_on()
            if fetch.failure is not None:
                raise fetch.failure
        finally:
            self.drop(fetch)

    def only(self, source: Iterator[Fetched]) -> Fetched:
        """Wait for the first piece of a source that has memory of its own."""
        return self._worker.submit(next, source).result()

    def wait(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None)

    def drop(self, fetch: Fetch) -> None:
        """Make no more pieces and forget those that are there; harmless when done twice."""
        with self._changed:
            fetch.is_over = True
            self._changed.wait_for(lambda: self._current is None or self._current[0] is not fetch)
            self._let_go(fetch)
            for _, piece in fetch.ready:
                self._landing.give(piece)
            fetch.ready.clear()
            if fetch in self._fetches:
                self._fetches.remove(fetch)
            self._go_on()

    def close(self) -> None:
        """Drop everything and wait for what is under way; harmless when done twice."""
        for fetch in [*self._fetches]:
            self.drop(fetch)
        self._worker.shutdown()

    def _memory(self) -> Iterator[NDArray[np.uint8]]:
        while True:
            assert self._current is not None
            yield self._landing.of(self._current[1])

    def _let_go(self, fetch: Fetch) -> None:
        if fetch.looked_at is not None:
            self._landing.give(fetch.looked_at)
            fetch.looked_at = None

    def _go_on(self) -> None:
        """Begin the next piece, where nothing is under way and there is room; under the lock."""
        if self._current is not None:
            return
        for fetch in sorted(self._fetches, key=lambda fetch: not fetch.is_attending):
            if fetch.is_over:
                continue
            landing = self._landing
            piece = landing.take_attending() if fetch.is_attending else landing.take_ahead()
            if piece is not None:
                self._current = fetch, piece
                self._worker.submit(self._make)
            # What started later waits for room, too.
            return

    def _make(self) -> None:
        assert self._current is not None
        fetch, piece = self._current
        fetched, failure = None, None
        try:
            fetched = next(fetch.source)
        except BaseException as error:
            # Whoever attends is told.
            failure = error
        with self._changed:
            self._current = None
            if fetched is None:
                fetch.failure = failure
                self._landing.give(piece)
            else:
                fetch.ready.append((fetched, piece))
            if fetched is None or fetched.is_last:
                fetch.is_over = True
            self._go_on()
            self._changed.notify_all()
