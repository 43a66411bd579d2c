# SPDX-License-Identifier: Apache-2.0
"""Turns at the drive: reads on demand go before reads ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Read = TypeVar("_Read")


class ReadTurns:
    """A lock that reads on demand get before reads ahead.

    Attention waits for what it demands, while what is read ahead has until the next layer. No read
    is broken off: who reads ahead takes a turn for each of many pieces.

    Who reads on demand may be interrupted by Ctrl-C anywhere; a turn ends, and others are told, all
    the same. So these are no context managers: between the frames of one, an interrupt would leave
    the turn taken for as long as its traceback lives. Reads ahead are another thread's.

    Parameters
    ----------
    changed
        What those wait for who have no turn yet; one of its own where None.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self._changed = threading.Condition() if changed is None else changed
        self._taken = False
        self._demanded = 0

    def demand(self) -> None:
        """Let nobody read ahead until `satisfy`, between the turns of one who has several."""
        noted = 0
        try:
            with self._changed:
                self._demanded += 1
                noted = 1
        except BaseException:
            self._demanded -= noted
            self.wake()
            raise

    def satisfy(self) -> None:
        """Take a demand back."""
        with self._changed:
            self._demanded -= 1
            self._changed.notify_all()

    def on_demand(self, read: Callable[[], _Read]) -> _Read:
        """Wait for the end of the turn under way, at most, and read in the next one."""
        is_mine = False
        try:
            with self._changed:
                self._demanded += 1
                try:
                    self._changed.wait_for(lambda: not self._taken)
                    self._taken = is_mine = True
                finally:
                    self._demanded -= 1
            return read()
        finally:
            if is_mine:
                self._taken = False
            # Also where it never came: who reads ahead may have looked while it was wanted.
            self.wake()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Wait until nobody reads or wants to read on demand, and have a turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._demanded)
            self._taken = True
        try:
            yield
        finally:
            self._taken = False
            self.wake()

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()
