# SPDX-License-Identifier: Apache-2.0
"""A process that ends a session where its host was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hillinfer.devices import child_session


class SessionGuard:
    """Kills what works in a folder, and removes the folder, once this process has ended.

    A process of its own: a thread of a process that calls XRT stands still where such a call keeps
    the interpreter's lock and never returns, and where the interpreter is ending.

    Parameters
    ----------
    folder
        The working folder of a session.

    Raises
    ------
    OSError
        Where no process can be started; the folder is gone then.
    """

    def __init__(self, folder: Path) -> None:
        # Open at this end as long as this process lives, whatever ends it.
        theirs, self._life = os.pipe()
        try:
            # In a session of its own, which no interrupt of this process's terminal reaches.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", child_session.__file__, folder, str(theirs)],
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
