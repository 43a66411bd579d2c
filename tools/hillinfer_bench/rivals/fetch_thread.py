# SPDX-License-Identifier: Apache-2.0
"""Fetches that run while attention works on what came before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hillinfer_bench.rivals.landing import Landing
from hillinfer_bench.rivals.pooled_rows import Fetched

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
