# SPDX-License-Identifier: Apache-2.0
"""Shadows read from the drive just ahead of scoring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.storage.shadow_store import STREAM_BUFFERS, ShadowStore


class ShadowStream:
    """Hands out the shadows of one layer in order, each valid until the next is asked for.

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
        self._buffers = [store.buffer() for _ in range(STREAM_BUFFERS)]
        self._slots: Sequence[int] = ()
        self._next = 0
        self._current: tuple[int, NDArray[np.uint8]] | None = None
        self._ahead: deque[tuple[int, NDArray[np.uint8], Future[None]]] = deque()

    def begin(self, slots: Sequence[int]) -> None:
        """Start to read these slots, which will be asked for in this order."""
        wait([reading for _, _, reading in self._ahead])
        self._ahead.clear()
        self._current = None
        self._slots, self._next = slots, 0
        for buffer in self._buffers:
            self._read_next(buffer)

    def shadow(self, slot: int) -> NDArray[np.uint8]:
        """Return the shadow in a slot, uint8 (segment_beats, 64).

        The last one may be asked for again; any other only in the order that was announced.
        """
        if self._current is not None and self._current[0] == slot:
            return self._current[1]
        if self._current is not None:
            self._read_next(self._current[1])
            self._current = None
        if not self._ahead or self._ahead[0][0] != slot:
            # Whoever scores again, or in another order, starts over from here.
            rest = list(self._slots)
            self.begin(rest[rest.index(slot) :])
        expected, buffer, reading = self._ahead.popleft()
        assert expected == slot
        started = time.perf_counter()
        reading.result()
        self._counters.drive_wait_seconds += time.perf_counter() - started
        self._current = slot, buffer
        return buffer

    def _read_next(self, buffer: NDArray[np.uint8]) -> None:
        if self._next < len(self._slots):
            slot = self._slots[self._next]
            self._next += 1
            self._counters.shadow_read_bytes += self._store.slot_bytes
            self._ahead.append((slot, buffer, self._store.read(slot, buffer)))
