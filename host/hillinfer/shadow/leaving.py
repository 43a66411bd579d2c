# SPDX-License-Identifier: Apache-2.0
"""Shadows that are being written to the drive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from hillinfer.errors import ColdPoolError
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.shadow.store import ShadowStore
from hillinfer.statistics import Counters

# DRAM still holds them.
LEAVING_SHADOWS = 4


class LeavingShadows:
    """Writes full shadows, a few at a time, and tells when DRAM may forget one.

    Parameters
    ----------
    store
        Where they go.
    counters
        Where bytes are counted.
    written
        Called with each that the drive has.
    stays
        Called with each that the drive did not take, and that has no slot any more.
    """

    def __init__(
        self,
        store: ShadowStore,
        counters: Counters,
        written: Callable[[SegmentLayer], None],
        stays: Callable[[SegmentLayer], None],
    ) -> None:
        self._store = store
        self._counters = counters
        self._written = written
        self._stays = stays
        self._leaving: deque[tuple[SegmentLayer, Future[None]]] = deque()

    def make_room(self) -> None:
        """Wait until another may leave.

        Raises
        ------
        ColdPoolError
            Where one that left before could not be written.
        """
        while len(self._leaving) >= LEAVING_SHADOWS:
            self._end_first()

    def send(self, own: SegmentLayer) -> None:
        """Begin to write a full shadow, for which there is room; it has a slot from here on."""
        assert own.shadow is not None
        slot = self._store.take()
        try:
            writing = self._store.write(slot, own.shadow)
        except BaseException:
            # A slot that nothing is written to must never be read.
            self._store.give(slot)
            raise
        own.slot = slot
        self._leaving.append((own, writing))
        self._counters.shadow_write_bytes += self._store.slot_bytes

    def end_done(self) -> None:
        """Tell of those that are written by now."""
        while self._leaving and self._leaving[0][1].done():
            self._end_first()

    def settle(self) -> None:
        """Wait for all; raises as `make_room`."""
        while self._leaving:
            self._end_first()

    def settle_quietly(self) -> None:
        """Wait for all; what was not written is told by whoever still needs it."""
        while self._leaving:
            with suppress(ColdPoolError):
                self._end_first()

    def _end_first(self) -> None:
        own, writing = self._leaving.popleft()
        try:
            writing.result()
        except BaseException:
            # Its codes stay in DRAM, so nothing is lost but the room that was hoped for.
            assert own.slot is not None
            self._store.give(own.slot)
            own.slot = None
            self._stays(own)
            raise
        self._written(own)
