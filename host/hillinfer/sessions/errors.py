# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a saved session."""

from __future__ import annotations

from pathlib import Path

from hillinfer.errors import HillInferError
from hillinfer.system_reason import SHORTAGE, reason_of, way_out


class SessionError(HillInferError):
    """A session cannot be saved, or what lies in its directory cannot be trusted or used."""


def cannot_save(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why a session cannot be saved and what to do."""
    fix = way_out(error, "choose another directory with --save-session")
    return SessionError(f"cannot save the session {directory}: {what}: {reason_of(error)}; {fix}")


def cannot_open(directory: Path, what: str, error: OSError) -> SessionError:
    """Return the error that says why something of a session cannot be opened and what to do.

    Where the reason is a shortage of this process, nothing is said about the session.
    """
    fix = way_out(error, "read the document again with --save-session")
    if error.errno in SHORTAGE:
        return SessionError(
            f"the session {directory} cannot be opened now: {what}: {reason_of(error)}; {fix}"
        )
    return SessionError(f"the session {directory} is refused: {what}: {reason_of(error)}; {fix}")


def damaged(directory: Path, what: str) -> SessionError:
    """Return the error that says what is wrong with a saved session."""
    return SessionError(
        f"the session {directory} is refused: {what}; read the document again with --save-session"
    )


def changed_in_use(directory: Path, what: str) -> SessionError:
    """Return the error that says that a session changed under a cache that reads it."""
    return SessionError(
        f"the session {directory} was changed while a cache reads it: {what}; leave its directory "
        "as it is until the cache is closed, and load it again, or read the document again with "
        "--save-session"
    )
