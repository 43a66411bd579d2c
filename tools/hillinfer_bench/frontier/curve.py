# SPDX-License-Identifier: Apache-2.0
"""Curves of cost over quality: a system's settings in order of KL, and interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

# A setting cannot be told from the full cache below this; also what keeps logarithms finite.
LEAST_KL = 1e-9


@dataclass(frozen=True)
class Point:
    """One setting of a system.

    Parameters
    ----------
    value
        Of the system's knob; a larger one costs more and is nearer to the full cache.
    kl
        KL to the full cache, in nats.
    share
        Bytes of rows and codes that a step needs, over the rows of all tokens.
    """

    value: float
    kl: float
    share: float


@dataclass(frozen=True)
class Crossing:
    """Where a system has a KL.

    Parameters
    ----------
    kl
        Asked for, in nats.
    value, share
        As in `Point`; None where no setting that was measured reaches it.
    why
        In words, where they are None or not those of this KL; empty elsewhere.
    """

    kl: float
    value: float | None
    share: float | None
    why: str = ""


class Curve:
    """Settings of one system whose knob can have any value, at least one.

    More of a knob cannot be worse; where measured KLs say so, neighbours share the mean of their
    logarithms. Between two settings value and share are lines over log KL. Nothing is said beyond
    the settings that were measured.

    Parameters
    ----------
    points
        In any order, no two with the same value.

    Raises
    ------
    ValueError
        There is no point.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        if not points:
            raise ValueError("a curve needs a point")
        self.points = tuple(sorted(points, key=lambda one: one.value))
        self._logs = falling([log(max(one.kl, LEAST_KL)) for one in self.points])

    @property
    def falling_kls(self) -> list[float]:
        """The KLs in order of the knob, none above the one before it."""
        return [exp(one) for one in self._logs]

    def at(self, kl: float) -> Crossing:
        """Return the least value and share that have a KL, in nats above 0."""
        wanted = log(max(kl, LEAST_KL))
        if wanted < self._logs[-1]:
            best = self.points[-1].value
            return Crossing(
                kl, None, None, f"not reached by any setting: {best:g} has {self._told(-1)}"
            )
        if wanted > self._logs[0]:
            least = self.points[0].value
            why = f"every setting is nearer to the full cache: {least:g} has {self._told(0)}"
            return Crossing(kl, None, None, why)
        return self._between(kl, wanted)

    def _between(self, kl: float, wanted: float) -> Crossing:
        at = next(i for i, one in enumerate(self._logs) if one <= wanted)
        right = self.points[at]
        if at == 0 or self._logs[at] == wanted:
            return Crossing(kl, right.value, right.share)
        left = self.points[at - 1]
        part = (self._logs[at - 1] - wanted) / (self._logs[at - 1] - self._logs[at])
        return Crossing(
            kl,
            left.value + part * (right.value - left.value),
            left.share + part * (right.share - left.share),
        )

    def _told(self, place: int) -> str:
        return f"a KL of {exp(self._logs[place]):.2g}"


class StepCurve(Curve):
    """Settings of one system that has nothing between two of them, such as bits of a code.

    See `Curve` for its parameters.
    """

    def _between(self, kl: float, wanted: float) -> Crossing:
        at = next(i for i, one in enumerate(self._logs) if one <= wanted)
        point, own = self.points[at], exp(self._logs[at])
        why = (
            "" if self._logs[at] == wanted else f"the next setting there is, with a KL of {own:.2g}"
        )
        return Crossing(kl, point.value, point.share, why)


def falling(values: Sequence[float]) -> list[float]:
    """Return the falling sequence nearest to some values, by least squares.

    Neighbours that rise share their mean (pool adjacent violators).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
