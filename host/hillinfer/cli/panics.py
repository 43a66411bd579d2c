# SPDX-License-Identifier: Apache-2.0
"""What native libraries write to standard error before they raise."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_STANDARD_ERROR = 2


@contextmanager
def panics_unsaid() -> Iterator[None]:
    """Leave out what the system's standard error is written in a block that fails.

    A library in Rust that panics, as a tokenizer does over a hostile pattern, writes where in its
    sources that was and then raises what the command makes its one line of. What is written in a
    block that succeeds comes after it.
    """
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    with ExitStack() as opened:
        try:
            kept = opened.enter_context(tempfile.TemporaryFile())
            own = os.dup(_STANDARD_ERROR)
        except OSError:
            # It is closed, or there is no room: whatever is written goes where it goes.
            yield
            return
        opened.callback(os.close, own)
        os.dup2(kept.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(own, _STANDARD_ERROR)
        kept.seek(0)
        with suppress(OSError):
            os.write(_STANDARD_ERROR, kept.read())
