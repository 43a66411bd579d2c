# SPDX-License-Identifier: Apache-2.0
"""What the script `hillinfer` calls: takes signals first and imports the command then.

A module of its own, because importing the package takes most of the time that starting does.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_SAID = 600


def main() -> None:
    """Run the command and end the process, as `docs/endings.md` says, whenever a signal comes."""
    _take(_end_unbegun)
    try:
        from hillinfer.cli.main import main as command
    except Exception as error:
        _say_not_loaded(error)
        sys.exit(1)
    try:
        command()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
        # All has been told, so a signal only makes the interpreter's own end a shorter one.
        _take(lambda number, frame: os._exit(status))
        raise


def _take(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let a handler take the signals that whoever started this process has not ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, handler)


def _end_unbegun(number: int, frame: FrameType | None) -> None:
    # There is nothing to undo yet, and no exception passes safely through what is half imported.
    _say(f"hillinfer: interrupted ({signal.Signals(number).name})")
    os._exit(128 + number)


def _say_not_loaded(error: Exception) -> None:
    if os.environ.get("HILLINFER_TRACEBACK"):
        traceback.print_exception(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    shown = "".join(one if one.isprintable() else "?" for one in reason[:_MOST_SAID])
    _say(
        f"hillinfer: error: the command cannot be loaded: {shown}; raise the limits of this "
        "process (ulimit -a), or install HillInfer again"
    )


def _say(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))
