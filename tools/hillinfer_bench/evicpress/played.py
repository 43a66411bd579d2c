# SPDX-License-Identifier: Apache-2.0
"""Results of one rival on a workload: times to the first token, also at some request rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

DECODED = 4
"""Tokens that are decoded behind each question, and timed."""

ENGINE = "engine"
"""What a document lies as that rests, and whose answers a server's engine selects."""

# Shares of the rate at which one would have no pause.
_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass
class Played:
    """What one rival did.

    Parameters
    ----------
    first_tokens, token_seconds
        Of each request, in seconds; the latter none where nothing was decoded.
    agreements
        Of each request: the share of its answer's tokens that are those of all rows.
    documents, forms
        Of each request, which it asked for, and what that lay as.
    expected
        Of each request, the quality and the seconds to the first token that a whole profile tells
        of what the document lay as; none of who has no such form.
    dram_peak, read_bytes
        Most bytes that forms took, and bytes of rows that came from the drive.
    moves, moving_seconds
        Forms that were made between requests, and what that took.
    """

    first_tokens: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    expected: list[tuple[float, float]] = field(default_factory=list)
    dram_peak: int = 0
    read_bytes: int = 0
    moves: int = 0
    moving_seconds: float = 0.0

    def rate_curve(self, arrivals: Sequence[float]) -> list[tuple[float, float]]:
        """Return requests a second and the median first token then, computed; see `rate_curve`."""
        taken = [
            first + DECODED * token
            for first, token in zip(self.first_tokens, self.token_seconds, strict=True)
        ]
        return rate_curve(arrivals, self.first_tokens, taken)

    def utility(self, alpha: float) -> float:
        """Return the sum of α · agreement − time to first token of all requests."""
        return sum(
            alpha * quality - seconds
            for quality, seconds in zip(self.agreements, self.first_tokens, strict=True)
        )

    def expected_utility(self, alpha: float) -> float:
        """Return the sum of α · quality − time to first token, as they are expected to be."""
        return sum(alpha * quality - seconds for quality, seconds in self.expected)

    def figures(self) -> dict[str, Any]:
        """Return what tables show, as JSON has it."""
        by_document: dict[int, list[float]] = {}
        for number, quality in zip(self.documents, self.agreements, strict=True):
            by_document.setdefault(number, []).append(quality)
        means = sorted(fmean(own) for own in by_document.values())
        worst = means[: max(1, len(means) // 10)]
        return {
            "first_token_p50": float(np.percentile(self.first_tokens, 50)),
            "first_token_p95": float(np.percentile(self.first_tokens, 95)),
            "token_p50": median(self.token_seconds) if self.token_seconds else None,
            "agreement": fmean(self.agreements),
            "worst_tenth_agreement": fmean(worst),
            "dram_peak_bytes": self.dram_peak,
            "read_bytes": self.read_bytes,
            "moves": self.moves,
            "moving_seconds": self.moving_seconds,
            "forms": dict(Counter(self.forms)),
        }


# --- at a rate of requests ---


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
