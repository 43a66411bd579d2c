# SPDX-License-Identifier: Apache-2.0
"""When, and for whom, rows are ranked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolMoment:
    """One decode step of one sequence in one layer, as a hot pool sees it.

    Parameters
    ----------
    step
        The current step.
    length
        Context length N of the sequence whose rows are offered.
    alpha
        Importance rate α.
    kept_sinks, kept_recent
        First and newest tokens, which are always selected and never demoted for others.
    """

    step: int
    length: int
    alpha: float
    kept_sinks: int
    kept_recent: int
