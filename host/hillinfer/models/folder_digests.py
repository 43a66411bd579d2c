# SPDX-License-Identifier: Apache-2.0
"""What the files of a folder were when they were made, so that a change since then shows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

# Beside what says where the files came from, which versions before this one read, too.
_FILE = "digests.json"


def keep_digests(folder: Path) -> None:
    """Write down size and SHA-256 of every file of a folder, in a file of the folder itself."""
    found = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != _FILE
    }
    (folder / _FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def same_files(folder: Path) -> bool:
    """Whether a folder has the files it was made with, in their sizes; nothing is hashed."""
    try:
        found = {file.name: file.lstat().st_size for file in folder.iterdir() if file.name != _FILE}
        return found == {name: one["bytes"] for name, one in _kept(folder).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def changed_file(folder: Path) -> str | None:
    """Return the first file whose content is not what was made, or None.

    All of it is read and hashed each time: a second per 1.2 GB (measured with SHA instructions,
    see `docs/models.md`), against seconds of loading. Sizes and times of change are what a
    fault of the drive or a copied folder leaves as they were.

    Raises
    ------
    OSError
        Where a file cannot be read.
    """
    for name, one in _kept(folder).items():
        if _sha256(folder / name) != one["sha256"]:
            return name
    return None


def _kept(folder: Path) -> dict[str, dict[str, object]]:
    content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return dict(content)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
