# SPDX-License-Identifier: Apache-2.0
"""Programs outside Python that the hardware rooms use."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass


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
    ("Verilator", "verilator", "simulating the RTL", "apt install verilator"),
    ("Icarus Verilog", "iverilog", "the RTL's test benches", "apt install iverilog"),
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
        ToolFacts(name, shutil.which(program), purpose, fix)
        for name, program, purpose, fix in _PROGRAMS
    ]
    module = importlib.util.find_spec("pyxrt")
    found.append(
        ToolFacts(
            "pyxrt",
            (module.origin or "built in") if module else None,
            "the xrt device",
            "source XRT's setup.sh, which puts pyxrt on PYTHONPATH",
        )
    )
    return tuple(found)
