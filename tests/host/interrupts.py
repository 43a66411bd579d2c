# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a moment that a test chooses, with nothing in any function's place."""

import sys
from contextlib import contextmanager


class Interrupt:
    """Ends what this thread does when it comes to a function of Python's, or back from it; once.

    Parameters
    ----------
    function
        Which.
    event
        `call` right before its first line, or `return` behind its last one.
    caller
        The file that calls it; any where None.
    """

    def __init__(self, function, event, caller):
        self._code, self._event, self._caller = function.__code__, event, caller
        self._has_come = False

    def __call__(self, frame, event, _):
        if self._has_come or event != self._event or frame.f_code is not self._code:
            return
        if self._caller in (None, frame.f_back.f_code.co_filename):
            self._has_come = True
            raise KeyboardInterrupt


@contextmanager
def interrupted(function, event="return", caller=None):
    """Have an interrupt come in the block of code that this encloses; see `Interrupt`."""
    sys.setprofile(Interrupt(function, event, caller))
    try:
        yield
    finally:
        sys.setprofile(None)
