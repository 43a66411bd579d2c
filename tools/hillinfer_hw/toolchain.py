# SPDX-License-Identifier: Apache-2.0
"""Where the open tools of the C++ simulation are."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


class MissingToolError(RuntimeError):
    """A tool that is not installed; the message names it and how to install it."""


def find_compiler() -> str:
    """Return the path of g++.

    Raises
    ------
    MissingToolError
        Where there is none.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise MissingToolError("g++ is not installed; on Debian: apt install g++")
    return compiler


def find_ap_types() -> Path:
    """Return the folder of the open ap_int headers, which the hls4ml package carries.

    The package is found and not imported: its own dependencies are not needed.

    Raises
    ------
    MissingToolError
        Where it is not installed.
    """
    found = importlib.util.find_spec("hls4ml")
    if found is None or not found.submodule_search_locations:
        raise MissingToolError(
            "the ap_int headers are missing: pip install --no-deps hls4ml==1.3.0"
        )
    return Path(found.submodule_search_locations[0]) / "templates" / "vivado" / "ap_types"
