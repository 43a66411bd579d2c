# SPDX-License-Identifier: Apache-2.0
"""A figure that a goal is judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GoalPoint:
    """One measured figure.

    Parameters
    ----------
    value
        The figure.
    row
        What it was measured on.
    flagged
        The spread behind it is above 20 %; None where none is known.
    """

    value: float
    row: str
    flagged: bool | None = None
