# SPDX-License-Identifier: Apache-2.0
"""Child processes that end together with everything they have started.

Run by its path with `FOLDER LIFE`, this file is the guard of a session (`SessionGuard`): it uses
nothing but Python itself.
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

# --- Sessions of processes ---

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

    `process` is the leader and not waited for yet; all that belongs to the session works in
    `folder`.
    """
    # Not waited for yet, so its number is still its own, and its session's.
    _kill(os.killpg, process.pid)
    process.wait()
    # Whoever left the session still works in the folder.
    end_folder(folder)


def end_folder(folder: Path) -> None:
    """Kill every process that works in a folder, and remove the folder.

    The folder is nobody else's; where it is gone already nothing happens.
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


# --- The guard of a session ---


class SessionGuard:
    """Kills what works in a folder, and removes the folder, once this process has ended.

    A process of its own: a thread of a process that calls XRT stands still where such a call keeps
    the interpreter's lock and never returns, and where the interpreter is ending.

    The folder is that of a session of processes. Raises OSError where no process can be started;
    the folder is gone then.
    """

    def __init__(self, folder: Path) -> None:
        # Open at this end as long as this process lives, whatever ends it.
        theirs, self._life = os.pipe()
        try:
            # In a session of its own, which no interrupt of this process's terminal reaches.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder, str(theirs)],
                cwd="/", pass_fds=(theirs,), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            os.close(self._life)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(theirs)

    def close(self) -> None:
        """End the session, where that was not done yet, and the guard."""
        # Said, and not only closed: a fork of this process may have a copy of the pipe's end.
        with suppress(BrokenPipeError):
            os.write(self._life, b"\0")
        os.close(self._life)
        self._process.wait()


def main() -> None:
    """Wait until the process that holds the pipe's other end has ended, then end a folder."""
    folder, life = Path(sys.argv[1]), int(sys.argv[2])
    os.read(life, 1)
    end_folder(folder)


if __name__ == "__main__":
    main()
