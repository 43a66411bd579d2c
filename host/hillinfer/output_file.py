# SPDX-License-Identifier: Apache-2.0
"""Files that a run leaves: checked before it begins, written whole, for nobody but their owner."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hillinfer.errors import HillInferError, SettingsError

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_SCRATCH_PREFIX = ".report-"
_PAGE = bytes(4096)
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ReportError(HillInferError):
    """A report, or another file about a run, cannot be written where it should go."""


def prepare_report(file: Path, option: str, what: str = "the report") -> None:
    """Refuse at once a place where a file cannot be written later, and make its folder.

    A page is written beside it and removed, which shows a folder that takes no files and a file
    system without room. What is there already stays as it is.

    Parameters
    ----------
    file
        Where the file will go. A symbolic link will be replaced, not followed.
    option
        The option that named it, for the message.
    what
        What it is, for the message.

    Raises
    ------
    ReportError
        Where it cannot be written: no regular file is there, it is write-protected, or the folder
        cannot be made or takes no file.
    """
    try:
        make_folders(file.parent)
        _check_replaceable(file, option, what)
        scratch = _scratch(file.parent, _PAGE)
        scratch.unlink()
    except OSError as error:
        raise cannot_write(file, error, option, what) from error


def cannot_write(file: Path, error: OSError, option: str, what: str = "the report") -> ReportError:
    """Return the error that says why a file cannot be written and what to do."""
    return ReportError(f"cannot write {what} to {file}: {error.strerror}; choose another {option}")


def check_apart(outputs: Iterable[tuple[str, Path | None]]) -> None:
    """Refuse two options that name the same file.

    Parameters
    ----------
    outputs
        Options and the files that they name, None for none; a file that is read may be among them.

    Raises
    ------
    SettingsError
        Where one would overwrite another.
    """
    seen: dict[str, str] = {}
    for option, file in outputs:
        if file is None:
            continue
        # realpath takes whatever a user types, loops of links and names that are too long too.
        place = os.path.realpath(file)
        if place in seen:
            raise SettingsError(
                f"{seen[place]} and {option} both name {file}: give each a file of its own"
            )
        seen[place] = option


def write_whole(file: Path, data: bytes) -> None:
    """Write a file at one moment, whole or not at all, readable by its owner only.

    A file or a symbolic link that has the name is replaced.

    Parameters
    ----------
    file
        Where to; missing folders are made, owner-only.
    data
        All of it.

    Raises
    ------
    OSError
        Where that fails; nothing is left then, and what was there stays.
    """
    make_folders(file.parent)
    scratch = _scratch(file.parent, data)
    try:
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def make_folders(folder: Path) -> None:
    """Make a folder and what is missing above it, each for its owner only; OSError where not."""
    for one in reversed((folder, *folder.parents)):
        if not one.exists():
            one.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def _check_replaceable(file: Path, option: str, what: str) -> None:
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), None)
    if kind is None and not os.access(file, os.W_OK):
        kind = "write-protected"
    if kind is not None:
        raise ReportError(f"cannot write {what} to {file}: it is {kind}; choose another {option}")


def _scratch(folder: Path, data: bytes) -> Path:
    """Return a new file in a folder, with its content on the drive."""
    # mkstemp makes it owner-only from the start, whatever the umask is.
    descriptor, name = tempfile.mkstemp(prefix=_SCRATCH_PREFIX, dir=folder)
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            os.fchmod(out.fileno(), _FILE_MODE)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return path
