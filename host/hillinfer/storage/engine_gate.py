# SPDX-License-Identifier: Apache-2.0
"""Who reads through an engine, and whether it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class EngineGate:
    """Lets reads through until it is closed; closing waits for those under way."""

    def __init__(self) -> None:
        self._changing = threading.Condition()
        self._reading = 0
        self._closed = False

    def let_through(self, read: Callable[[], None]) -> None:
        """Read, counted for as long as it is under way.

        No context manager: an interrupt between its own frames would leave the read counted for as
        long as the traceback lives, and whoever closes meanwhile would wait for it.

        Raises
        ------
        RuntimeError
            After closing.
        """
        entered = False
        try:
            with self._changing:
                if self._closed:
                    raise RuntimeError("this engine is closed")
                self._reading += 1
                entered = True
            read()
        finally:
            if entered:
                with self._changing:
                    self._reading -= 1
                    self._changing.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait until nobody reads; harmless when done twice."""
        with self._changing:
            self._closed = True
            self._changing.wait_for(lambda: not self._reading)
