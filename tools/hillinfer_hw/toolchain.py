# SPDX-License-Identifier: Apache-2.0
"""Finds the open tools of the C++ simulation."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from hillinfer_hw.build_cache import BUILD, ROOT

# g++ looks for garbage whenever its heap has grown for a while. What it compiles here leaves
# little, and looking takes a seventh of its time.
NO_GARBAGE_COLLECTION = ("--param", "ggc-min-heapsize=2000000")


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


def find_pynq_python(folder: Path = BUILD / "pynq-env") -> Path:
    """Return the interpreter of the environment that the PYNQ front runs in.

    Raises
    ------
    MissingToolError
        Where the environment is missing, or was made from another lock file.
    """
    lock, installed = ROOT / "tools" / "pynq_env" / "requirements.txt", folder / "installed"
    if not installed.is_file() or installed.read_bytes() != lock.read_bytes():
        state = "of another lock file" if installed.is_file() else "missing"
        raise MissingToolError(f"the environment of the PYNQ front is {state}: make pynq-env")
    return folder / "bin" / "python"
