# SPDX-License-Identifier: Apache-2.0
"""Where the cold pool lies."""

from __future__ import annotations

import stat
from pathlib import Path

from hillinfer.errors import ColdPoolError
from hillinfer.system_reason import reason_of, way_out
from hillinfer.user_cache import user_cache_dir

_ANOTHER = "choose a directory on a drive with --cold-dir"
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a drive without a file system"),
)


def prepared_cold_dir(chosen: Path | None) -> Path:
    """Return the directory to use; only the default one is made where it is missing.

    Raises
    ------
    ColdPoolError
        Where a chosen directory does not exist or is none.
    SettingsError
        Where the default one cannot be made.
    """
    if chosen is None:
        return user_cache_dir("cold")
    try:
        mode = chosen.stat().st_mode
    except FileNotFoundError as error:
        raise ColdPoolError(_missing(chosen)) from error
    except (OSError, ValueError) as error:
        # A path with a zero byte is a ValueError.
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        fix = way_out(error, _ANOTHER) if isinstance(error, OSError) else _ANOTHER
        raise ColdPoolError(
            f"the cold directory {_shown(chosen)} cannot be looked at: {reason}; {fix}"
        ) from error
    if not stat.S_ISDIR(mode):
        kind = next((name for is_one, name in _KINDS if is_one(mode)), "something else")
        raise ColdPoolError(
            f"the cold directory {chosen} is no directory but {kind}: {_ANOTHER}, or make one there"
        )
    return chosen


def _missing(chosen: Path) -> str:
    if chosen.is_symlink():
        return (
            f"the cold directory {chosen} does not exist: it is a link to {chosen.readlink()}, "
            f"where nothing is; make that directory, or {_ANOTHER}"
        )
    return (
        f"the cold directory {chosen} does not exist or is no directory: create it with "
        f"mkdir -p, or {_ANOTHER}"
    )


def _shown(path: Path) -> str:
    """Return a path for a line of text: a name of thousands of letters is cut."""
    text = str(path)
    return text if len(text) <= 200 and text.isprintable() else f"{text[:200]!a}..."
