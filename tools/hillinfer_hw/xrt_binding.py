# SPDX-License-Identifier: Apache-2.0
"""The module pyxrt: XRT's own where it has one for this interpreter, else ours."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from hillinfer_hw.build_cache import ROOT, cached
from hillinfer_hw.run_tool import run_tool
from hillinfer_hw.toolchain import MissingToolError, find_compiler
from hillinfer_hw.xrt_installation import XrtInstallation


def find_binding(xrt: XrtInstallation) -> Path:
    """Return the folder of a module pyxrt, which is built once where XRT has none.

    Raises
    ------
    MissingToolError
        Where one has to be built, without XRT's headers or pybind11.
    RuntimeError
        Where the compiler refuses it.
    """
    found = PathFinder.find_spec("pyxrt", [*map(str, xrt.modules), *sys.path])
    if found is not None and found.origin is not None:
        return Path(found.origin).parent
    return build_binding(xrt)


def build_binding(xrt: XrtInstallation) -> Path:
    """Return the folder of our module pyxrt for this interpreter; errors as for `find_binding`."""
    source = ROOT / "tools" / "pyxrt_binding" / "pyxrt.cpp"
    if not (xrt.headers / "xrt" / "xrt_kernel.h").is_file():
        raise MissingToolError(f"XRT's headers are missing: {xrt.fix}")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise MissingToolError("Python's headers are missing: apt-get install python3-dev")
    if importlib.util.find_spec("pybind11") is None:
        raise MissingToolError("pybind11 is missing: pip install pybind11")
    import pybind11

    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    folders = (pybind11.get_include(), sysconfig.get_path("include"), str(xrt.headers))

    def make(folder: Path) -> None:
        run_tool(
            [
                *(find_compiler(), "-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"),
                *(*(f"-I{one}" for one in folders), str(source)),
                *("-o", str(folder / f"pyxrt{suffix}")),
                *(f"-L{xrt.libraries}", "-lxrt_coreutil", "-luuid", "-pthread"),
            ]
        )

    described = (suffix, pybind11.__version__, str(xrt.headers), xrt.version)
    contents = [source.read_bytes(), *(text.encode() for text in described)]
    return cached("pyxrt", contents, make)
