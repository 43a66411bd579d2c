# SPDX-License-Identifier: Apache-2.0
"""Build outputs named by what they were made from."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def cached(kind: str, sources: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` fills, made once per content of `sources`.

    Several processes may ask at once: each builds in a folder of its own, and the first to finish
    gives it its name.

    Parameters
    ----------
    kind
        Subfolder of the build folder.
    sources
        Everything the result depends on, in a fixed order.
    make
        Fills the folder it is given.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(len(source).to_bytes(8, "little"))
        digest.update(source)
    folder = BUILD / kind / digest.hexdigest()[:24]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        make(own)
        os.rename(own, folder)  # noqa: PTH104 - the error number matters
    except OSError:
        # Another process was first: its folder has the same content.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return folder
