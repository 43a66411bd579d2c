# SPDX-License-Identifier: Apache-2.0
"""What is aimed at, what was reached, and whether the machine was quiet enough to say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A spread above this says that the machine was not quiet.
_NOISE = 0.2


@dataclass(frozen=True)
class StoreGoal:
    """A figure beside its limit.

    Parameters
    ----------
    name
        Of the figure.
    goal
        In words, with its sign.
    limit
        The number of it; None where there is none.
    reached
        The figure; None where it was not measured.
    is_met
        None where it was not measured.
    is_noisy
        Whether rounds differ by more than a fifth: then nothing counts as met.
    why
        Why it was not measured; empty where it was.
    allowed
        What arithmetic allows by what else was measured in the same run, where a goal lies beyond
        it; None elsewhere.
    """

    name: str
    goal: str
    limit: float | None
    reached: float | None
    is_met: bool | None
    is_noisy: bool = False
    why: str = ""
    allowed: float | None = None

    @property
    def share_of_allowed(self) -> float | None:
        """What was reached of what arithmetic allows: 1 is all of it."""
        if self.allowed is None or self.reached is None:
            return None
        own, best = self.reached, self.allowed
        return own / best if self.goal.startswith(">=") else best / own


def at_least(
    name: str,
    reached: float,
    limit: float,
    *rounds: Sequence[float],
    allowed: float | None = None,
) -> StoreGoal:
    """Return a goal that is met from a limit on, where no rounds are noisy."""
    noisy = any(map(is_noisy, rounds))
    met = bool(reached >= limit) and not noisy
    beyond = allowed if allowed is not None and allowed < limit else None
    return StoreGoal(name, f">= {limit:g}", limit, float(reached), met, noisy, allowed=beyond)


def at_most(
    name: str,
    reached: float,
    limit: float,
    *rounds: Sequence[float],
    allowed: float | None = None,
) -> StoreGoal:
    """Return a goal that is met up to a limit, where no rounds are noisy."""
    noisy = any(map(is_noisy, rounds))
    met = bool(reached <= limit) and not noisy
    beyond = allowed if allowed is not None and allowed > limit else None
    return StoreGoal(name, f"<= {limit:g}", limit, float(reached), met, noisy, allowed=beyond)


def unmeasured(name: str, goal: str, why: str) -> StoreGoal:
    """Return a goal whose figure is not there."""
    return StoreGoal(name, goal, None, None, None, why=why)


def is_noisy(seconds: Sequence[float]) -> bool:
    """Say whether the quarters of some times lie more than a fifth apart."""
    low, high = np.quantile(seconds, (0.25, 0.75))
    return bool(high > (1 + _NOISE) * low)


def goals_text(goals: Sequence[StoreGoal]) -> str:
    """Return a line for each."""
    lines = []
    for one in goals:
        verdict = {None: "not measured", True: "met", False: "not met"}[one.is_met]
        noise = " !" if one.is_noisy else ""
        reached = "" if one.reached is None else f"{one.reached:.3g}{noise}"
        why = f" ({one.why})" if one.why else ""
        if one.share_of_allowed is not None:
            bound = "at most" if one.goal.startswith(">=") else "no less than"
            why = f" ({bound} {one.allowed:.3g} is possible here: {one.share_of_allowed:.0%} of it)"
        lines.append(f"{one.name:>28}  {reached:>10}  goal {one.goal}: {verdict}{why}")
    if any(one.is_noisy for one in goals):
        lines.append("!: rounds differ by more than a fifth; nothing counts as met then")
    return "\n".join(lines)
