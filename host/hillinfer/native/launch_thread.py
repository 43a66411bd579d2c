# SPDX-License-Identifier: Apache-2.0
"""A thread of the native library that scores launches."""

from __future__ import annotations

import ctypes
import weakref

from hillinfer.native.errors import NativeError
from hillinfer.native.library import NativeLibrary, native_library
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
        # What launches under way read and write. The finalizer has it, too: where nobody closes the
        # thread, nothing else may be left when it ends.
        self._held: list[object] = []
        # A thread that nobody closed ends with this object; no process waits for it to exit.
        self._end = weakref.finalize(self, _close, self._library, thread, self._held)
        self._end.atexit = False

    def begin(
        self, variant: Variant, sequence: object, pieces: int, count: int, held: object
    ) -> None:
        """Begin a launch, after the one before.

        Parameters
        ----------
        variant
            Instructions to use.
        sequence
            A reference to a `Sequence`, of which shape and threads are looked at.
        pieces, count
            Address and number of pieces.
        held
            What has them and what they point to; kept until the launch is over.

        Raises
        ------
        NativeError
            It is closed.
        """
        if self._thread is None:
            raise NativeError("the thread for launches is closed")
        # Noted first: an interrupt must not free what a launch has begun to read.
        self._held.append(held)
        self._library.call_holding(
            "hillinfer_launches_begin", self._thread, variant.number, sequence, pieces, count
        )
        # The one before is over now.
        del self._held[:-1]

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


def _close(library: NativeLibrary, thread: ctypes.c_void_p, held: list[object]) -> None:
    library.close_launches(thread)
    held.clear()
