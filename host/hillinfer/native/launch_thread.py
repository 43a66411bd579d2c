# SPDX-License-Identifier: Apache-2.0
"""A thread of the native library that scores launches."""

from __future__ import annotations

import ctypes
import weakref

from hillinfer.native.errors import NativeError
from hillinfer.native.library import native_library
from hillinfer.native.variant import Variant


class LaunchThread:
    """Scores one launch after the other, without Python's global lock, beside its caller.

    Raises
    ------
    NativeError
        The library is missing.
    """

    def __init__(self) -> None:
        self._library = native_library()
        thread = ctypes.c_void_p()
        self._library.call("hillinfer_launches_open", ctypes.byref(thread))
        self._thread: ctypes.c_void_p | None = thread
        # A thread that nobody closed ends with this object; no process waits for it to exit.
        self._end = weakref.finalize(self, self._library.close_launches, thread)
        self._end.atexit = False

    def begin(self, variant: Variant, sequence: object, pieces: int, count: int) -> None:
        """Begin a launch, after the one before.

        Parameters
        ----------
        variant
            Instructions to use.
        sequence
            A reference to a `Sequence`, of which shape and threads are looked at.
        pieces, count
            Address and number of pieces; what they point to must live until `wait` returns.

        Raises
        ------
        NativeError
            It is closed.
        """
        if self._thread is None:
            raise NativeError("the thread for launches is closed")
        self._library.call_holding(
            "hillinfer_launches_begin", self._thread, variant.number, sequence, pieces, count
        )

    def wait(self) -> None:
        """Return when no launch is under way.

        Raises
        ------
        MemoryError
            The last one found none.
        """
        if self._thread is not None:
            self._library.call("hillinfer_launches_wait", self._thread)

    def close(self) -> None:
        """End the thread, and what is under way before; harmless when done twice."""
        self._thread = None
        self._end()
