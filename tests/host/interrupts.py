# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a moment that a test chooses, with nothing in any function's place."""

import sys
from contextlib import contextmanager


class Interrupt:
    """Ends what this thread does when a function of Python's goes back, once.

    Attributes
    ----------
    has_come
        Whether it did.
    """

    def __init__(self, function):
        self._code, self.has_come = function.__code__, False

    def __call__(self, frame, event, _):
        if event == "return" and frame.f_code is self._code and not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt


@contextmanager
def interrupted_behind(function):
    """Have an interrupt come behind a function that the block of code calls in this thread."""
    interrupt = Interrupt(function)
    sys.setprofile(interrupt)
    try:
        yield interrupt
    finally:
        sys.setprofile(None)
