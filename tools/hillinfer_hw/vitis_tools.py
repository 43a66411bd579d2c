# SPDX-License-Identifier: Apache-2.0
"""Finds Vitis, its platform and XRT's tools, and names what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PLATFORM_PATHS = "PLATFORM_REPO_PATHS"
_COMPILER = "v++"
_USUAL_PLATFORMS = Path("/opt/xilinx/platforms")
_WHERE_FROM = {
    _COMPILER: "the compiler of Vitis; source settings64.sh of Vitis 2021.2 to 2022.2",
    "vivado": "comes with Vitis; source settings64.sh",
    "emconfigutil": "comes with Vitis; source settings64.sh",
    "xclbinutil": "comes with Vitis and with XRT; source /opt/xilinx/xrt/setup.sh",
}
_VERSION_OPTION = {"vivado": "-version", "xclbinutil": "--version"}
_VERSION = re.compile(r"v?\d+\.\d+")
_VERSION_SECONDS = 120


def vitis_is_there() -> bool:
    """Return whether Vitis' compiler is on PATH; `missing` says what else it needs."""
    return shutil.which(_COMPILER) is not None


def find_platform(platform: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the `.xpfm` of a platform, or None where it is not installed.

    Parameters
    ----------
    platform
        Its name, looked for where v++ looks, or the path of the file or its folder.
    environment
        Instead of the process' own.
    """
    given = Path(platform)
    if len(given.parts) > 1 or given.suffix == ".xpfm":
        found = given / f"{given.name}.xpfm" if given.is_dir() else given
        return found.resolve() if found.is_file() else None
    own = os.environ if environment is None else environment
    folders = [Path(path) for path in own.get(PLATFORM_PATHS, "").split(":") if path]
    if "XILINX_VITIS" in own:
        folders.append(Path(own["XILINX_VITIS"]) / "platforms")
    for folder in [*folders, _USUAL_PLATFORMS]:
        for file in (folder / platform / f"{platform}.xpfm", folder / f"{platform}.xpfm"):
            if file.is_file():
                return file.resolve()
    return None


def missing(programs: Sequence[str], platform: str) -> list[str]:
    """Return one line for each program and platform that a build needs and that is not there."""
    lines = [
        f"{program} is not on PATH ({_WHERE_FROM[program]})"
        for program in programs
        if shutil.which(program) is None
    ]
    if find_platform(platform) is None:
        lines.append(
            f"the platform {platform} is not installed: no .xpfm of it under {PLATFORM_PATHS} "
            f"({os.environ.get(PLATFORM_PATHS) or 'not set'}) or {_USUAL_PLATFORMS}; install its "
            "development package, or give the .xpfm with --platform"
        )
    return lines


def tool_versions(programs: Sequence[str]) -> dict[str, str]:
    """Return the line that says the version of each program; `unknown` where none does."""
    return {program: _version(program) for program in programs}


def _version(program: str) -> str:
    command = [program, _VERSION_OPTION.get(program, "--version")]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    for line in (done.stdout + done.stderr).splitlines():
        if _VERSION.search(line):
            return line.strip("* \t")
    return "unknown"
