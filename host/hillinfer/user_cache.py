# SPDX-License-Identifier: Apache-2.0
"""Where HillInfer keeps files between runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.output_file import make_folders

_OWNER_ONLY = 0o700


def user_cache_dir(*parts: str) -> Path:
    """Return a folder below the user's cache directory, which only the user can enter.

    `$XDG_CACHE_HOME/hillinfer`, or `~/.cache/hillinfer` where the variable is unset or relative
    (the XDG base directory specification ignores relative values). Every folder that is missing is
    made for its owner alone, whatever the umask; HillInfer's own folders are made so again where
    others may enter them. What lies above them is left as it is: who may write there can put
    another folder in the place of HillInfer's, but not one that belongs to this user.

    Raises
    ------
    SettingsError
        Where a folder cannot be made, or one of HillInfer's belongs to another user.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = configured if configured.is_absolute() else Path("~/.cache").expanduser()
    folder = home
    try:
        make_folders(home)
        for name in ("hillinfer", *parts):
            folder = folder / name
            make_folders(folder)
            _keep_for_owner(folder)
    except OSError as error:
        raise SettingsError(
            f"cannot make the folder {folder}: {error.strerror}; set XDG_CACHE_HOME to one of yours"
        ) from error
    return folder


def _keep_for_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise SettingsError(
            f"the folder {folder} belongs to user {found.st_uid}, who could change what is in it: "
            "remove it, or set XDG_CACHE_HOME to a folder of yours"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(_OWNER_ONLY)
