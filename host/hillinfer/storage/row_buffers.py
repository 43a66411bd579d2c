# SPDX-License-Identifier: Apache-2.0
"""Two buffers of rows that all reads of a runtime take turns with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.gathered_rows import GatheredRows


class RowBuffers:
    """Fills one buffer while the caller computes on the other.

    Parameters
    ----------
    rows, row_bytes
        Size of each.

    Attributes
    ----------
    rows, row_bytes
        As given.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        size = rows * row_bytes
        self._buffers = [aligned_buffer(size)[:size].reshape(-1, row_bytes) for _ in range(2)]
        self._promoting: list[Future[tuple[int, int]] | None] = [None, None]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-gather")
        self._upcoming: Future[GatheredRows] | None = None

    def begin(
        self, fill: Callable[[int], GatheredRows], turn: int, turns: int
    ) -> Future[GatheredRows] | None:
        """Let the thread of these buffers fill the next one.

        Parameters
        ----------
        fill
            Fills a buffer that it takes, given the turn.
        turn, turns
            Which of how many.

        Returns
        -------
        What it fills, or None behind the last turn.
        """
        self._upcoming = self._ahead.submit(fill, turn) if turn < turns else None
        return self._upcoming

    def take(self, which: int, rows: int) -> NDArray[np.uint8]:
        """Return the first rows of a buffer, once nothing is promoted from it any more.

        Parameters
        ----------
        which
            0 or 1.
        rows
            How many.

        Returns
        -------
        uint8 (rows, row_bytes).
        """
        promoting, self._promoting[which] = self._promoting[which], None
        if promoting is not None:
            wait([promoting])
        return self._buffers[which][:rows]

    def lend(self, which: int, promoting: Future[tuple[int, int]]) -> None:
        """Leave a buffer alone until a promotion from it has ended."""
        self._promoting[which] = promoting

    def settle(self) -> None:
        """Wait for a stream that was left in the middle: all reads share these buffers."""
        if self._upcoming is not None:
            wait([self._upcoming])

    def close(self) -> None:
        """Stop the thread."""
        self._ahead.shutdown(cancel_futures=True)
