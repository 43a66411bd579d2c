# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: one fault in one file, and the tests that must fail of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# Words in names of native sources, and the variants that are compiled of these alone.
_VARIANTS = {"avx2": "avx2", "avx512": "avx512vnni", "avx512vnni": "avx512vnni", "neon": "neon"}


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

    @property
    def variant(self) -> str | None:
        """The one native variant that it is a fault of, by the name of its file; None for others.

        Where a processor lacks it, tests of the other variants pass, and the fault is not seen.
        """
        words = Path(self.file).stem.split("_")
        return next((_VARIANTS[word] for word in words if word in _VARIANTS), None)

    def applied_to(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises
        ------
        ValueError
            Where the original text does not occur exactly once: the code has moved on, and the
            mutant must follow.
        """
        found = text.count(self.original)
        if found != 1:
            raise ValueError(
                f"mutant {self.name}: its original text occurs {found} times in {self.file}, not "
                "once; write it as the file has it now"
            )
        return text.replace(self.original, self.changed)


@dataclass(frozen=True)
class Equivalent:
    """A fault that no test can see, because no output differs.

    Parameters
    ----------
    name, fault
        As of a mutant.
    reason
        Why no output differs.
    """

    name: str
    fault: str
    reason: str
