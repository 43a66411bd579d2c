# SPDX-License-Identifier: Apache-2.0
"""Finds XRT: Debian's packages, or the one that a shell was set up for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hillinfer_hw.toolchain import MissingToolError

XRT_VARIABLE = "XILINX_XRT"
_DRIVER = "libxrt_hwemu.so.2"


@dataclass(frozen=True)
class XrtInstallation:
    """One XRT.

    Parameters
    ----------
    headers, libraries
        Folders to compile and to link with.
    modules
        Folders of its Python modules, beside those of this interpreter.
    version
        What it says of itself; `unknown` where it says nothing.
    fix
        What to do where its headers are missing.
    """

    headers: Path
    libraries: Path
    modules: tuple[Path, ...]
    version: str
    fix: str


def debian_xrt() -> XrtInstallation:
    """Return the XRT of Debian's packages.

    Raises
    ------
    MissingToolError
        Without the driver for hw_emu.
    """
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        driver = folder / _DRIVER
        if driver.exists():
            version = driver.resolve().name.removeprefix("libxrt_hwemu.so.")
            fix = "apt-get install libxrt-dev uuid-dev"
            return XrtInstallation(Path("/usr/include/xrt"), folder, (), version, fix)
    raise MissingToolError("XRT's hw_emu driver is missing: apt-get install libxrt1 unzip")


def sourced_xrt(environment: Mapping[str, str]) -> XrtInstallation:
    """Return the XRT whose `setup.sh` set these variables.

    Raises
    ------
    MissingToolError
        Where none did.
    """
    named = environment.get(XRT_VARIABLE)
    if not named:
        raise MissingToolError(
            f"{XRT_VARIABLE} is not set (the XRT of the Vitis release; source "
            "/opt/xilinx/xrt/setup.sh)"
        )
    root = Path(named)
    fix = f"{root} is no whole XRT; install its package again"
    version = _version(root / "version.json")
    return XrtInstallation(root / "include", root / "lib", (root / "python",), version, fix)


def _version(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["BUILD_VERSION"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
