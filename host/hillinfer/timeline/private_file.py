# SPDX-License-Identifier: Apache-2.0
"""Files about a run, for nobody but who ran it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.output_file import make_folders


def private_file(file: Path, what: str, option: str) -> FileIO:
    """Open a file or a link's name anew for writing, readable by its owner only.

    Whoever still writes to a file that was there before writes to that one, not into this.

    Parameters
    ----------
    file
        Where.
    what, option
        What it is and the option that names it, for the error.

    Raises
    ------
    SettingsError
        Where it cannot be made.
    """
    try:
        make_folders(file.parent)
        if file.is_symlink() or file.is_file():
            # A link is replaced, and what it leads to stays. Where a file cannot be taken away it
            # is emptied instead.
            with suppress(OSError):
                file.unlink()
        return FileIO(file, "w", opener=_private)
    except OSError as error:
        raise SettingsError(
            f"cannot write {what} to {file}: {error.strerror}; choose another {option}"
        ) from error


def _private(file: str, flags: int) -> int:
    descriptor = os.open(file, flags, 0o600)
    # A file that was there before keeps its mode otherwise.
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return descriptor
