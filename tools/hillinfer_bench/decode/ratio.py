# SPDX-License-Identifier: Apache-2.0
"""How one system's time compares with another's on one case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians.

    Parameters
    ----------
    name
        `over_floor`: the system's over that of the loop's floor. `speedup_vs_transformers`: that of
        the faster stock cache over the system's.
    system
        Whose rows they are.
    row, against
        Names of both rows.
    value
        The ratio.
    context, alpha
        Of the case.
    flagged
        A spread behind it is above 20 %.
    """

    name: str
    system: str
    row: str
    against: str
    value: float
    context: int
    alpha: float
    flagged: bool
