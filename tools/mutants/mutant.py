# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: one fault in one file, and the tests that must fail of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Built(StrEnum):
    """What must be built anew in the copy before its tests run."""

    NOTHING = "nothing"
    NATIVE = "native"


@dataclass(frozen=True)
class Mutant:
    """A fault in the sources.

    Parameters
    ----------
    name
        Unique, lower case, words joined by hyphens.
    fault
        What is wrong once it is applied, in one sentence.
    file
        Path from the project's root.
    original, changed
        Text that occurs exactly once in the file, and what takes its place.
    killers
        Test files or pytest node ids; at least one of their tests must fail.
    built
        What must be built before they run. HLS C++ and RTL are built by their tests.
    """

    name: str
    fault: str
    file: str
    original: str
    changed: str
    killers: tuple[str, ...]
    built: Built = Built.NOTHING
