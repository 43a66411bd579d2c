# SPDX-License-Identifier: Apache-2.0
"""Where the cold pool lies when nobody says where."""

from __future__ import annotations

import os
from pathlib import Path

from hillinfer.errors import ColdPoolError


def default_cold_dir() -> Path:
    """Return the user's cache directory for cold pools, which need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hillinfer" / "cold"


def prepared_cold_dir(chosen: Path | None) -> Path:
    """Return the directory to use; only the default one is made where it is missing.

    Raises
    ------
    ColdPoolError
        Where a chosen directory does not exist or is none.
    """
    if chosen is None:
        directory = default_cold_dir()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ColdPoolError(
                f"cannot make the cold directory {directory}: {error.strerror}; choose one with "
                "--cold-dir"
            ) from error
        return directory
    if not chosen.is_dir():
        raise ColdPoolError(
            f"the cold directory {chosen} does not exist or is no directory: create it, or choose "
            "another with --cold-dir"
        )
    return chosen
