# SPDX-License-Identifier: Apache-2.0
"""A goal beside what was reached, as every report of this project has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite


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
        A row behind it is; None where nothing is known of that.
    """

    value: float
    row: str
    flagged: bool | None = None


@dataclass(frozen=True)
class GoalBound(ABC):
    """A side of a limit.

    Parameters
    ----------
    limit
        In the figure's unit.
    """

    limit: float

    @abstractmethod
    def worst(self, points: Sequence[GoalPoint]) -> GoalPoint:
        """Return the point that is the farthest from reaching it; at least one is given."""

    @abstractmethod
    def reached(self, value: float) -> bool:
        """Return whether a figure reaches it."""


class AtLeast(GoalBound):
    """The limit or more."""

    def worst(self, points: Sequence[GoalPoint]) -> GoalPoint:
        """Return the smallest; see `GoalBound`."""
        return min(points, key=lambda point: point.value)

    def reached(self, value: float) -> bool:
        """Return whether a figure reaches it; see `GoalBound`."""
        return value >= self.limit


class MoreThan(AtLeast):
    """More than the limit."""

    def reached(self, value: float) -> bool:
        """Return whether a figure is above it; see `GoalBound`."""
        return value > self.limit


class AtMost(GoalBound):
    """The limit or less."""

    def worst(self, points: Sequence[GoalPoint]) -> GoalPoint:
        """Return the largest; see `GoalBound`."""
        return max(points, key=lambda point: point.value)

    def reached(self, value: float) -> bool:
        """Return whether a figure keeps within it; see `GoalBound`."""
        return value <= self.limit


@dataclass(frozen=True)
class GoalRecord:
    """One goal, and how far it was reached.

    Parameters
    ----------
    goal
        In words.
    reached
        The worst of what was measured; None where nothing was.
    row
        What that was measured on, or why nothing was.
    met
        None where what was measured cannot tell.
    flagged
        A flagged row lies behind it; None where nothing is known of that.

    Raises
    ------
    ValueError
        Where that is no such record.
    """

    goal: str
    reached: float | None
    row: str
    met: bool | None
    flagged: bool | None

    def __post_init__(self) -> None:
        """Refuse what no report may hold."""
        if not all(isinstance(text, str) and text for text in (self.goal, self.row)):
            raise ValueError(f"goal {self.goal!r} and row {self.row!r} must be texts")
        for value in (self.met, self.flagged):
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{self.goal}: {value!r} is neither a bool nor None")
        if self.reached is None:
            if self.met:
                raise ValueError(f"{self.goal}: met without anything reached")
        elif (
            isinstance(self.reached, bool)
            or not isinstance(self.reached, (int, float))
            or not isfinite(self.reached)
        ):
            raise ValueError(f"{self.goal}: {self.reached!r} is no number")
        if self.met and self.flagged:
            raise ValueError(f"{self.goal}: met by what is flagged")


def judged(
    goal: str, points: Sequence[GoalPoint], bound: GoalBound, missing: Sequence[str] = ()
) -> GoalRecord:
    """Return a goal beside its worst point.

    It is missed by one point that does not reach the bound, whatever else is not known; not judged
    where something is missing; not met where a point is flagged.

    Parameters
    ----------
    goal
        In words.
    points
        At least one.
    bound
        What each has to reach.
    missing
        What the goal is about and was not measured.
    """
    worst = bound.worst(points)
    flagged = _flagged(points)
    met: bool | None = False
    if bound.reached(worst.value):
        met = None if missing else not flagged
    row = worst.row
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        row += f"; not measured: {missing[0]}{more}"
    return GoalRecord(goal, round(worst.value, 3), row, met, flagged)


def unjudged(goal: str, points: Sequence[GoalPoint], bound: GoalBound, unknown: str) -> GoalRecord:
    """Return the worst of some points without a verdict, or the reason where there are none."""
    if not points:
        return GoalRecord(goal, None, unknown, None, None)
    worst = bound.worst(points)
    flagged = _flagged(points)
    return GoalRecord(goal, round(worst.value, 3), worst.row, None, flagged)


def _flagged(points: Sequence[GoalPoint]) -> bool | None:
    if any(point.flagged for point in points):
        return True
    return None if any(point.flagged is None for point in points) else False
