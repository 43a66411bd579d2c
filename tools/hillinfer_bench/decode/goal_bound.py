# SPDX-License-Identifier: Apache-2.0
"""What a figure has to reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hillinfer_bench.decode.goal_point import GoalPoint


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
