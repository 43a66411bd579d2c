# SPDX-License-Identifier: Apache-2.0
"""Seconds of many decode steps as a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LARGEST_SPREAD = 0.2


@dataclass(frozen=True)
class Timing:
    """Milliseconds per decode step, all sequences of the batch together.

    Parameters
    ----------
    minimum, median
        Of the steps.
    spread
        What lies between the 10th and the 90th percentile, over the median.
    steps
        How many were measured.
    """

    minimum: float
    median: float
    spread: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Return the figures of at least one step."""
        low, median, high = np.percentile(seconds, (10, 50, 90)) * 1e3
        return cls(min(seconds) * 1e3, float(median), float((high - low) / median), len(seconds))

    @property
    def flagged(self) -> bool:
        """Whether the spread is too large for the median to mean much."""
        return self.spread > LARGEST_SPREAD
