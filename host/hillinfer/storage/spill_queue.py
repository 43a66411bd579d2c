# SPDX-License-Identifier: Apache-2.0
"""Collects new rows into full groups and sends them to the drive while computation goes on."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_store import ColdStore
from hillinfer_model.kernel_spec import GROUP_TOKENS


class SpillQueue:
    """Two buffers of whole groups: one is filled while the other is written.

    Parameters
    ----------
    store
        Writes the groups.
    buffer_rows
        Rows of one buffer, a multiple of 64.
    row_bytes
        Bytes of a row.
    counters
        Where waiting is counted.
    """

    def __init__(
        self, store: ColdStore, buffer_rows: int, row_bytes: int, counters: Counters
    ) -> None:
        self._store = store
        self._counters = counters
        self.buffer_groups = buffer_rows // GROUP_TOKENS
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(2):
            buffer = aligned_buffer(buffer_rows * row_bytes)[: buffer_rows * row_bytes]
            self._free.put(buffer.reshape(buffer_rows, row_bytes))

    def buffer(self) -> NDArray[np.uint8]:
        """Return a buffer to fill, uint8 (buffer_rows, row_bytes), waiting until one is free."""
        started = time.perf_counter()
        buffer = self._free.get()
        self._counters.drive_wait_seconds += time.perf_counter() - started
        return buffer

    def put_back(self, buffer: NDArray[np.uint8]) -> None:
        """Give back a buffer that will not be sent, because filling it went wrong."""
        self._free.put(buffer)

    def send(
        self,
        layer: int,
        groups: NDArray[np.int64],
        buffer: NDArray[np.uint8],
        promoting: Future[tuple[int, int]] | None,
    ) -> None:
        """Queue the first rows of a buffer to be written.

        Parameters
        ----------
        layer, groups
            Where to: int64 group numbers, one per 64 rows.
        buffer
            From `buffer`.
        promoting
            Who else looks at it, until it is done.
        """
        rows = buffer[: len(groups) * GROUP_TOKENS]

        def written() -> None:
            if promoting is None:
                self._free.put(buffer)
            else:
                # Also called where it is done already, or cancelled.
                promoting.add_done_callback(lambda _: self._free.put(buffer))

        self._store.write_groups(layer, groups, rows, written)
