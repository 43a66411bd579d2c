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


class NumberedInterrupt:
    """Ends what this thread does at one of the moments that a file's functions begin or end at.

    Parameters
    ----------
    code
        Of any function in that file.
    number
        Which moment, counted from 0.
    """

    def __init__(self, code, number):
        self._file, self.left = code.co_filename, number

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename == self._file and event in ("call", "return"):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt


@contextmanager
def interrupted_at(function, number):
    """Have an interrupt come at a moment of the file that a function lies in; see above.

    Yields what tells by `left` below 0 that it has come.
    """
    interrupt = NumberedInterrupt(function.__code__, number)
    sys.setprofile(interrupt)
    try:
        yield interrupt
    finally:
        sys.setprofile(None)
