# SPDX-License-Identifier: Apache-2.0
"""Versions of what generation stands on, against the window that was tried."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata

RUN_EXTRA = "run"


@dataclass(frozen=True)
class PackageFacts:
    """One package: its version here and the window that this release supports.

    Parameters
    ----------
    name
        Name of the distribution.
    version
        Installed version; None where it is missing.
    window
        Version specifier of this release's own metadata, like `>=5.23,<5.24`.
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


def run_packages() -> tuple[PackageFacts, ...]:
    """Return the packages that generating needs, read from this distribution's metadata."""
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
        holds = {
            ">=": here >= there,
            "<=": here <= there,
            "==": here == there,
            "<": here < there,
            ">": here > there,
        }[match.group(1)]
        if not holds:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in number.group().split(".")) if number else ()


def _padded(release: tuple[int, ...], size: int) -> tuple[int, ...]:
    return release + (0,) * (size - len(release))
