# SPDX-License-Identifier: Apache-2.0
"""The XRT library of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

_FOLDERS = ("/opt/xilinx/xrt/lib", "/usr/lib/*-linux-gnu", "/usr/lib64")
_LIBRARY = "libxrt_coreutil.so.2"


def find_xrt_library(prefix: str | None = None, folders: tuple[str, ...] = _FOLDERS) -> str | None:
    """Return where XRT is and its version, or None where it is not.

    Parameters
    ----------
    prefix
        Where its setup.sh points to; `XILINX_XRT` where None.
    folders
        Patterns of places to look at besides.
    """
    own = prefix if prefix is not None else os.environ.get("XILINX_XRT")
    places = [Path(own) / "lib"] if own else []
    for pattern in folders:
        places += sorted(Path("/").glob(pattern.lstrip("/")))
    for place in places:
        library = place / _LIBRARY
        if library.exists():
            return f"{_version(place, library)} in {place}"
    return None


def _version(place: Path, library: Path) -> str:
    try:
        content = json.loads((place.parent / "version.json").read_text(encoding="utf-8"))
        return str(content["BUILD_VERSION"])
    except (OSError, ValueError, KeyError, TypeError):
        return library.resolve().name.removeprefix("libxrt_coreutil.so.")
