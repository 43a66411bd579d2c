# SPDX-License-Identifier: Apache-2.0
"""Caches build outputs under a hash of what they were made from."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def cached(
    kind: str, sources: Iterable[bytes], make: Callable[[Path], None], build: Path = BUILD
) -> Path:
    """Return the folder that `make` fills, made once per content of `sources`.

    Several processes may ask at once: one builds, in a folder that gets its name when it is whole,
    and the others wait for it.

    Parameters
    ----------
    kind
        Subfolder of the build folder.
    sources
        Everything the result depends on, in a fixed order.
    make
        Fills the folder it is given.
    build
        The build folder.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(len(source).to_bytes(8, "little"))
        digest.update(source)
    folder = build / kind / digest.hexdigest()[:24]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        # Given up with the file, however this process ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _make(folder, make)
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    own = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        make(own)
        own.rename(folder)
    finally:
        shutil.rmtree(own, ignore_errors=True)
