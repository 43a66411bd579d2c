# SPDX-License-Identifier: Apache-2.0
"""Processes in a session of their own, ended with everything they have started.

Also a program that uses nothing but Python itself, `child_session.py FOLDER LIFE`: see
`SessionGuard`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_KILL_S = 10.0


def processes_in(folder: Path) -> list[int]:
    """Return the ids of the processes that work in a folder or below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                place = (entry / "cwd").readlink()
            except OSError:
                continue  # Ended meanwhile, or another user's.
            if place.is_relative_to(folder):
                found.append(int(entry.name))
    return found


def end_session(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill a session's leader and everything it has started, and remove its folder.

    Parameters
    ----------
    process
        Leader of a session; not waited for yet.
    folder
        The working folder of all that belongs to it.
    """
    # Not waited for yet, so its number is still its own, and its session's.
    _kill(os.killpg, process.pid)
    process.wait()
    # Whoever left the session still works in the folder.
    end_folder(folder)


def end_folder(folder: Path) -> None:
    """Kill every process that works in a folder, and remove the folder.

    Parameters
    ----------
    folder
        Nobody else's; harmless where it is gone already.
    """
    end = time.monotonic() + _KILL_S
    while (left := processes_in(folder)) and time.monotonic() < end:
        for own in left:
            _kill(os.kill, own)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError):
        kill(number, signal.SIGKILL)


def main() -> None:
    """Wait until the process that holds the pipe's other end has ended, then end a folder."""
    folder, life = Path(sys.argv[1]), int(sys.argv[2])
    os.read(life, 1)
    end_folder(folder)


if __name__ == "__main__":
    main()
