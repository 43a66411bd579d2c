# SPDX-License-Identifier: Apache-2.0
"""Finds the context from which on one runtime decodes faster than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class CrossoverKind(StrEnum):
    """Where the crossing lies."""

    BELOW = "at or below the shortest context measured"
    MEASURED = "between measured contexts"
    EXTRAPOLATED = "beyond the longest context, on the line through the last two"
    NONE = "nowhere: the other one's time grows no faster"
    UNKNOWN = "one context: not known"


@dataclass(frozen=True)
class Crossover:
    """The context from which on a step takes no longer than the other's.

    Parameters
    ----------
    kind
        How it was found.
    context
        In tokens; None where there is none or it is not known.
    """

    kind: CrossoverKind
    context: float | None

    @classmethod
    def of(
        cls, contexts: Sequence[int], ours: Sequence[float], theirs: Sequence[float]
    ) -> Crossover:
        """Find where `ours` crosses `theirs` for the last time, linear between contexts.

        Parameters
        ----------
        contexts
            Ascending, at least one.
        ours, theirs
            Time of a step at each.
        """
        behind = [own - other for own, other in zip(ours, theirs, strict=True)]
        if behind[-1] <= 0:
            late = [place for place, gap in enumerate(behind) if gap > 0]
            if not late:
                return cls(CrossoverKind.BELOW, float(contexts[0]))
            return cls(CrossoverKind.MEASURED, _zero(contexts, behind, late[-1]))
        if len(contexts) < 2:
            return cls(CrossoverKind.UNKNOWN, None)
        if behind[-1] >= behind[-2]:
            return cls(CrossoverKind.NONE, None)
        return cls(CrossoverKind.EXTRAPOLATED, _zero(contexts, behind, len(contexts) - 2))


def _zero(contexts: Sequence[int], behind: Sequence[float], place: int) -> float:
    """Return where the line through a place and the next is zero."""
    left, right = contexts[place], contexts[place + 1]
    return left + (right - left) * behind[place] / (behind[place] - behind[place + 1])
