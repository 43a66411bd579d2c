# SPDX-License-Identifier: Apache-2.0
"""One thread at a time uses what caches share."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from types import FrameType, TracebackType

from hillinfer.errors import CacheUseError

# A user's thread gets no word where a use broke off by an interrupt, so it looks by itself.
_LOOK_AGAIN_S = 0.05
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_TORCH_CALLS = "torch.nn.modules.module"


class Use:
    """What one thread does with a cache from now until `end`, or until a call of it is over.

    Torch runs no hook after a forward pass that Ctrl-C broke off, so `end` may never be called.
    Such a use is over all the same: the call that it belongs to is no longer on its thread's stack.
    Until `end` it keeps the variables of that call alive.

    Parameters
    ----------
    frame
        Of that call, in the calling thread.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()
        self.over = threading.Event()

    def end(self) -> None:
        """Note that it is over; harmless when done twice."""
        self._frame = None
        self.over.set()

    def is_of(self, frame: FrameType) -> bool:
        """Whether it belongs to this call and is not over."""
        return self._frame is frame

    @property
    def is_own(self) -> bool:
        """Whether the thread that asks is in the middle of it."""
        return self._thread == threading.get_ident() and self.is_under_way

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread is in the middle of it."""
        return self._thread != threading.get_ident() and self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether any thread is in the middle of it."""
        wanted = self._frame
        if wanted is None:
            return False
        own = self._thread == threading.get_ident()
        frame = sys._getframe() if own else sys._current_frames().get(self._thread)
        while frame is not None:
            if frame is wanted:
                return True
            if frame.f_back is None and not own and frame.f_code.co_flags & _SUSPENDS:
                # It was left while its stack was walked: nothing is known until the next look.
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


class Turns:
    """Lets uses of different threads begin one after the other, in the order in which they came."""

    def __init__(self) -> None:
        # A signal's handler may use a cache while its thread holds this.
        self._lock = threading.RLock()
        # The first has its turn. Held weakly, because the frame of a use holds its cache.
        self._queue: deque[weakref.ref[Use]] = deque()

    @property
    def is_own(self) -> bool:
        """Whether the thread that asks is in the middle of the use whose turn it is."""
        first = self._first()
        return first is not None and first.is_own

    def take(self, use: Use) -> None:
        """Wait until it is a use's turn, which lasts until the use is over.

        Raises
        ------
        CacheUseError
            Where this thread is in the middle of another use, for which it would wait for ever.
        """
        self._queue.append(weakref.ref(use))
        while (first := self._first()) is not use:
            # It is in the queue itself, and under way.
            assert first is not None
            if first.is_own:
                use.end()
                raise CacheUseError(
                    "a forward pass is under way in this thread, of this cache or of another of "
                    "the same attachment, which share files and threads: wait until it is through"
                )
            first.over.wait(_LOOK_AGAIN_S)

    def _first(self) -> Use | None:
        """Return whose turn it is, after those that are over have left."""
        with self._lock:
            while self._queue:
                place = self._queue[0]
                first = place()
                if first is not None and first.is_under_way:
                    return first
                with suppress(ValueError):
                    self._queue.remove(place)
        return None


def forward_frame() -> FrameType:
    """Return the innermost call of a torch module on the stack, or the caller's own call."""
    caller = frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_call_impl" and frame.f_globals.get("__name__") == _TORCH_CALLS:
            return frame
    return caller
