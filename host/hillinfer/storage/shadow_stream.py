# SPDX-License-Identifier: Apache-2.0
"""Shadows read from the drive just ahead of scoring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.storage.read_plan import MAX_READ_BYTES
from hillinfer.storage.shadow_store import STREAM_BUFFERS, ShadowStore


@dataclass(frozen=True)
class _Buffers:
    """Memory that shadows are read to at once, and each of them in it."""

    memory: NDArray[np.uint8]
    shadows: list[NDArray[np.uint8]]


@dataclass(frozen=True)
class _Batch:
    """Slots that are read, or were, to the first of some buffers."""

    slots: Sequence[int]
    buffers: _Buffers
    reading: Future[None]


class ShadowStream:
    """Hands out the shadows of one layer in order, each valid until the next is asked for.

    Small shadows are read several at once: to hand a read to another thread and to wait for it
    takes longer than to score one of them.

    Parameters
    ----------
    store
        Where they lie.
    counters
        Where bytes and waits are counted.
    """

    def __init__(self, store: ShadowStore, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        together = together_of(store.slot_bytes)
        self._all = [_Buffers(*store.buffers(together)) for _ in range(STREAM_BUFFERS // together)]
        self._free = list(self._all)
        self._slots: Sequence[int] = ()
        self._next = 0
        self._current: _Batch | None = None
        self._ahead: deque[_Batch] = deque()
        # Every read that may not be done, whatever came between its start and its place in line.
        self._readings: list[Future[None]] = []

    def begin(self, slots: Sequence[int]) -> None:
        """Start to read these slots, which will be asked for in this order."""
        wait(self._readings)
        # An error or Ctrl-C may have left buffers in no place, or in two.
        self._ahead.clear()
        self._current = None
        self._free = list(self._all)
        self._readings.clear()
        self._slots, self._next = slots, 0
        self._read_ahead()

    def shadow(self, slot: int) -> NDArray[np.uint8]:
        """Return the shadow in a slot, uint8 (segment_beats, 64).

        The last one may be asked for again; any other only in the order that was announced.
        """
        if self._current is None or slot not in self._current.slots:
            self._give_current()
            self._read_ahead()
            if not self._ahead or self._ahead[0].slots[0] != slot:
                # Whoever scores again, or in another order, starts over from here.
                rest = list(self._slots)
                self.begin(rest[rest.index(slot) :])
            started = time.perf_counter()
            # Until then it stays in line, where `begin` waits for it whatever comes in between.
            self._ahead[0].reading.result()
            self._current = self._ahead.popleft()
            self._counters.drive_wait_seconds += time.perf_counter() - started
        return self._current.buffers.shadows[self._current.slots.index(slot)]

    def _give_current(self) -> None:
        if self._current is not None:
            self._free.append(self._current.buffers)
            self._current = None

    def _read_ahead(self) -> None:
        while self._free and self._next < len(self._slots):
            buffers = self._free.pop()
            slots = self._slots[self._next : self._next + len(buffers.shadows)]
            self._next += len(slots)
            self._counters.shadow_read_bytes += len(slots) * self._store.slot_bytes
            self._readings = [one for one in self._readings if not one.done()]
            self._readings.append(self._store.read_together(slots, buffers.memory))
            self._ahead.append(_Batch(slots, buffers, self._readings[-1]))


def together_of(slot_bytes: int) -> int:
    """Return how many shadows of a size are read at once, a divisor of all buffers."""
    together = STREAM_BUFFERS
    while together > 1 and together * slot_bytes > MAX_READ_BYTES:
        together //= 2
    return together
