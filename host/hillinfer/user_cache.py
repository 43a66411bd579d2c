# SPDX-License-Identifier: Apache-2.0
"""Where HillInfer keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path

from hillinfer.errors import SettingsError


def user_cache_dir(*parts: str) -> Path:
    """Return a folder below the user's cache directory, made owner-only where it was missing.

    `$XDG_CACHE_HOME/hillinfer`, or `~/.cache/hillinfer` where the variable is unset or relative
    (the XDG base directory specification ignores relative values).

    Raises
    ------
    SettingsError
        Where the folder cannot be made.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = configured if configured.is_absolute() else Path("~/.cache").expanduser()
    folder = home.joinpath("hillinfer", *parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder {folder}: {error.strerror}; set XDG_CACHE_HOME to one of yours"
        ) from error
    return folder
