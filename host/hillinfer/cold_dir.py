# SPDX-License-Identifier: Apache-2.0
"""Where the cold pool lies."""

from __future__ import annotations

from pathlib import Path

from hillinfer.errors import ColdPoolError
from hillinfer.user_cache import user_cache_dir


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
    if not _is_folder(chosen):
        raise ColdPoolError(
            f"the cold directory {chosen} does not exist or is no directory: create it, or choose "
            "another with --cold-dir"
        )
    return chosen


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # A name that is too long, or a folder above it that may not be looked into.
        return False
