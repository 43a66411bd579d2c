# SPDX-License-Identifier: Apache-2.0
"""How soon first tokens come at a rate of requests, computed from how long each one took alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Shares of the rate at which one would have no pause.
_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def first_tokens_at(
    arrivals: Sequence[float], first_tokens: Sequence[float], taken: Sequence[float]
) -> list[float]:
    """Return the seconds from each arrival to its first token, one request after the other.

    Parameters
    ----------
    arrivals
        In seconds, ascending.
    first_tokens, taken
        Of each request alone: to its first token, and to its end.
    """
    free, found = 0.0, []
    for arrival, first, whole in zip(arrivals, first_tokens, taken, strict=True):
        begun = max(free, arrival)
        found.append(begun - arrival + first)
        free = begun + whole
    return found


def rate_curve(
    arrivals: Sequence[float], first_tokens: Sequence[float], taken: Sequence[float]
) -> list[tuple[float, float]]:
    """Return pairs of requests a second and the median first token, arrivals stretched to fit.

    Parameters as in `first_tokens_at`; arrivals are those of a trace, at any rate.
    """
    begin, span = arrivals[0], max(arrivals[-1] - arrivals[0], 1e-9)
    most = len(taken) / sum(taken)
    curve = []
    for load in _LOADS:
        stretch = len(taken) / (load * most) / span
        times = [(one - begin) * stretch for one in arrivals]
        found = first_tokens_at(times, first_tokens, taken)
        curve.append((load * most, float(np.median(found))))
    return curve
