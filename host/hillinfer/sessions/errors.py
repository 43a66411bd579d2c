# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a saved session."""

from __future__ import annotations

import errno
from pathlib import Path

from hillinfer.errors import HillInferError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SessionError(HillInferError):
    """A session cannot be saved, or what lies in its directory cannot be trusted or used."""


def cannot_save(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why a session cannot be saved and what to do."""
    fix = "free space on the drive, or" if error.errno in _FULL else "check the drive, or"
    return SessionError(
        f"cannot save the session {directory}: {what}: {error.strerror}; {fix} choose another "
        "directory with --save-session"
    )


def damaged(directory: Path, what: str) -> SessionError:
    """Return the error that says what is wrong with a saved session."""
    return SessionError(
        f"the session {directory} is refused: {what}; read the document again with --save-session"
    )
