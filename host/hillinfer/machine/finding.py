# SPDX-License-Identifier: Apache-2.0
"""One thing that `hillinfer doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a finding stands."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    OPTIONAL = "not found"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Parameters
    ----------
    name
        What.
    verdict
        MISSING keeps `hillinfer generate` from working; OPTIONAL does not.
    found
        What is there.
    fix
        What to do; None where nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str | None = None
