# SPDX-License-Identifier: Apache-2.0
"""What every lane did during one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hillinfer.timeline.lane import Lane
from hillinfer.timeline.span import Span

_Stretch = tuple[int, int]


@dataclass(frozen=True)
class StepTrace:
    """One step and the spans that lie in it at least partly.

    Parameters
    ----------
    step
        The step itself.
    spans
        All others, by start.
    """

    step: Span
    spans: tuple[Span, ...]

    @property
    def nanoseconds(self) -> int:
        """How long the step took."""
        return self.step.stop - self.step.start

    def of(self, lane: Lane) -> tuple[Span, ...]:
        """Return the spans of a lane."""
        return tuple(one for one in self.spans if one.lane is lane)

    def busy(self, lane: Lane) -> int:
        """Return the nanoseconds of the step in which anything of a lane went on."""
        return _length(self._stretches(lane))

    def hidden(self, lane: Lane) -> int:
        """Return the nanoseconds in which a lane was busy while compute was, too."""
        return _length(_common(self._stretches(lane), self._stretches(Lane.COMPUTE)))

    def _stretches(self, lane: Lane) -> list[_Stretch]:
        first, last = self.step.start, self.step.stop
        return _union((max(one.start, first), min(one.stop, last)) for one in self.of(lane))


def _union(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Return the same time without overlaps, ascending."""
    joined: list[_Stretch] = []
    for start, stop in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _common(left: list[_Stretch], right: list[_Stretch]) -> list[_Stretch]:
    """Return the time that two unions share."""
    shared = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            shared.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(stretches: list[_Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)
