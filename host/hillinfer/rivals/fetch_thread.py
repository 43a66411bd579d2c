# SPDX-License-Identifier: Apache-2.0
"""Fetches that run while attention works on what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from hillinfer.rivals.pooled_rows import Fetched

# One piece is attended to while the next one comes.
PIECES_AHEAD = 2


class Pieces:
    """Pieces of one fetch, in order, each valid until the next is asked for.

    Parameters
    ----------
    worker
        A pool of one thread.
    source
        Makes the pieces, in buffers that it takes in turns.
    """

    def __init__(self, worker: ThreadPoolExecutor, source: Iterator[Fetched]) -> None:
        self._worker = worker
        self._source = source
        self._coming: deque[Future[Fetched | None]] = deque()
        for _ in range(PIECES_AHEAD):
            self._ask()

    def __iter__(self) -> Iterator[Fetched]:
        while (piece := self._coming.popleft().result()) is not None:
            yield piece
            self._ask()

    def wait(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for one in self._coming:
            one.exception()

    def _ask(self) -> None:
        self._coming.append(self._worker.submit(next, self._source, None))


class FetchThread:
    """Works on one fetch after the other in a thread, `PIECES_AHEAD` pieces of each at a time."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-rival")

    def start(self, source: Iterator[Fetched]) -> Pieces:
        """Begin to make pieces; `source` is run by the thread alone."""
        return Pieces(self._worker, source)

    def close(self) -> None:
        """Wait for what is under way; harmless when done twice."""
        self._worker.shutdown()
