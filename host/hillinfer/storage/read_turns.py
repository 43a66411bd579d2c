# SPDX-License-Identifier: Apache-2.0
"""Who reads next, where only one may at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadTurns:
    """A lock that reads on demand get before reads ahead.

    Attention waits for what it demands, while what is read ahead has until the next layer. Nobody
    is interrupted: who reads ahead takes a turn for each of many pieces.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._demanded = 0

    @contextmanager
    def demanding(self) -> Iterator[None]:
        """Let nobody read ahead between the turns of one who reads on demand more than once."""
        with self._changed:
            self._demanded += 1
        try:
            yield
        finally:
            with self._changed:
                self._demanded -= 1
                self._changed.notify_all()

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Wait for the end of the turn under way, at most, and have the next one."""
        with self._changed:
            self._demanded += 1
            try:
                self._changed.wait_for(lambda: not self._taken)
                self._taken = True
            finally:
                self._demanded -= 1
        with self._ended():
            yield

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Wait until nobody reads or wants to read on demand, and have a turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._demanded)
            self._taken = True
        with self._ended():
            yield

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
