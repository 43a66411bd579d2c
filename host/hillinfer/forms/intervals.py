# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of the mean agreement of answers, from few samples, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def lower_end(agreements: Sequence[float], tokens: int) -> float:
    """Return the lower end of a 90 % interval of the mean agreement, from 0 to 1.

    It is the lower of two. Student's interval of the probes' means: tokens of a probe go wrong
    together. And Wilson's interval of all tokens: that a few probes agree in full does not say
    that all do.

    Parameters
    ----------
    agreements
        Of each probe, from 0 to 1.
    tokens
        Compared in all.
    """
    return max(0.0, _ends(agreements, tokens)[0])


def upper_end(agreements: Sequence[float], tokens: int) -> float:
    """Return the upper end of the same interval, the higher of the two; parameters as there."""
    return min(1.0, _ends(agreements, tokens)[1])


def expected_end(agreements: Sequence[float], tokens: int) -> float:
    """Return the lower end of a 90 % interval of what one more document keeps, from 0 to 1.

    It is the lower of two: Student's interval for one more of several means, and Wilson's interval
    of all tokens.

    Parameters
    ----------
    agreements
        Mean of each of several documents, two at least.
    tokens
        Compared in all.
    """
    count = len(agreements)
    spread = _student(count - 1) * stdev(agreements) * math.sqrt(1 + 1 / count)
    return max(0.0, min(fmean(agreements) - spread, _wilson(fmean(agreements), tokens)[0]))


def _wilson(mean: float, tokens: int) -> tuple[float, float]:
    squared = _NORMAL**2
    spread = _NORMAL * math.sqrt(mean * (1 - mean) / tokens + squared / (4 * tokens**2))
    middle, scale = mean + squared / (2 * tokens), 1 + squared / tokens
    return (middle - spread) / scale, (middle + spread) / scale


def _ends(agreements: Sequence[float], tokens: int) -> tuple[float, float]:
    mean, count = fmean(agreements), len(agreements)
    wilson = _wilson(mean, tokens)
    if count == 1:
        return wilson
    student = _student(count - 1) * stdev(agreements) / math.sqrt(count)
    return min(wilson[0], mean - student), max(wilson[1], mean + student)


# Of 90 % between both ends.
_NORMAL = 1.645
_STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def _student(freedom: int) -> float:
    """Return Student's quantile of 95 %, within 0.01."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + 1.6 / freedom
