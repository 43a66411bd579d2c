# SPDX-License-Identifier: Apache-2.0
"""Rows on the drive with a pool of those used last in DRAM."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.rivals.drive_rows import DriveRows
from hillinfer.rivals.meter import Meter
from hillinfer.rivals.setup import RivalSetup

# A unit's slot; a slot's unit and when it was used.
_UNIT_BYTES, _SLOT_BYTES = 4, 4 + 8


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
    """

    def __init__(self, setup: RivalSetup, rows: DriveRows, unit_rows: int, meter: Meter) -> None:
        self._setup = setup
        self._rows = rows
        self._meter = meter
        self.unit_bytes = unit_rows * rows.row_bytes
        self.units = rows.region_rows // unit_rows
        self._buffer = meter.buffer(rows.scatter_buffer_bytes(unit_rows))
        self._clock = 0
        self.take_pool(0)

    def take_pool(self, byte_count: int) -> None:
        """Make pools with as many slots as the bytes have room for, tables included; once."""
        setup = self._setup
        each = byte_count // setup.units - _UNIT_BYTES * self.units
        self.slots = slots = max(0, min(each // (self.unit_bytes + _SLOT_BYTES), self.units))
        shape = setup.shape.layers, setup.batch
        data = self._meter.buffer(setup.units * slots * self.unit_bytes)
        self._data = data.reshape(*shape, slots, self.unit_bytes)
        self._place = self._table((*shape, self.units if slots else 0), np.int32)
        self._owner = self._table((*shape, slots), np.int32)
        # Free slots go first: nothing was used before 0.
        self._used = self._table((*shape, slots), np.int64)

    def pool_bytes(self, slots: int) -> int:
        """Return what pools of that many slots take, tables included."""
        return self._setup.units * (
            _UNIT_BYTES * self.units + slots * (self.unit_bytes + _SLOT_BYTES)
        )

    def fetch(self, layer: int, row: int, units: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Bring units together.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        units
            int64 numbers, each once.
        out
            uint8 of shape (units, unit_bytes): units in the order given.
        """
        if not self.slots:
            self._rows.read_units(layer, row, units, out, np.arange(len(units)), self._buffer)
            return
        place, used = self._place[layer, row], self._used[layer, row]
        slots = place[units]
        hits, misses = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        out[hits] = self._data[layer, row, slots[hits]]
        used[slots[hits]] = self._ticks(len(hits))
        if not len(misses):
            return
        self._rows.read_units(layer, row, units[misses], out, misses, self._buffer)
        # Where they do not all fit, the last ones stay: those of the newest tokens.
        come = misses[-self.slots :]
        victims = np.argpartition(used, len(come) - 1)[: len(come)]
        owner = self._owner[layer, row]
        gone = owner[victims]
        place[gone[gone >= 0]] = -1
        owner[victims], place[units[come]] = units[come], victims
        used[victims] = self._ticks(len(come))
        self._data[layer, row, victims] = out[come]

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._data = np.empty((0, 0, 0, 0), np.uint8)
        self._place = self._owner = self._used = np.empty((0, 0, 0), np.int64)
        self.slots = 0

    def _ticks(self, count: int) -> NDArray[np.int64]:
        """Return times of use, each later than all before."""
        self._clock += count
        return np.arange(self._clock - count, self._clock)

    def _table(self, shape: tuple[int, ...], dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
        made = self._meter.array(shape, dtype)
        made[...] = -1
        return made
