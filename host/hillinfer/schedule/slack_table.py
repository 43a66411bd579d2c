# SPDX-License-Identifier: Apache-2.0
"""How long one layer computes, by new tokens and tokens before them: measured, and corrected."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# New tokens m and tokens before them P.
NEW_TOKENS = (1, 16, 64, 256, 1024)
PREFIX_TOKENS = (0, 1024, 4096, 16384, 65536)
# What one observation weighs against those before it.
_WEIGHT = 0.25


@dataclass(frozen=True)
class _Corner:
    """A point of the grid, and what it weighs between its neighbours."""

    row: int
    column: int
    weight: float


class SlackTable:
    """Compute windows C(m, P) of one layer in seconds, on a grid, bilinear between its points.

    Attention costs m · P and everything else m, so between points a plane in each of the two is
    what is expected, and beyond the last ones, too. Points that nobody measured are unknown until a
    pass comes near them. Any thread may use it.

    Parameters
    ----------
    new_tokens, prefix_tokens
        Of the grid, ascending, two of each at least.
    seconds
        float64 (new_tokens, prefix_tokens); NaN where unknown, as all are where None.
    """

    def __init__(
        self,
        new_tokens: Sequence[int] = NEW_TOKENS,
        prefix_tokens: Sequence[int] = PREFIX_TOKENS,
        seconds: NDArray[np.float64] | None = None,
    ) -> None:
        self.new_tokens, self.prefix_tokens = tuple(new_tokens), tuple(prefix_tokens)
        shape = len(self.new_tokens), len(self.prefix_tokens)
        if min(shape) < 2 or any(
            list(axis) != sorted(set(axis)) for axis in (self.new_tokens, self.prefix_tokens)
        ):
            raise ValueError(f"a grid of {shape} points must ascend and have two of each axis")
        self._seconds = np.full(shape, math.nan) if seconds is None else seconds.copy()
        if self._seconds.shape != shape:
            raise ValueError(f"windows of shape {self._seconds.shape} are none of a grid {shape}")
        self._changing = threading.Lock()

    @classmethod
    def measured(
        cls,
        measure: Callable[[int, int], float],
        new_tokens: Sequence[int] = NEW_TOKENS,
        prefix_tokens: Sequence[int] = PREFIX_TOKENS,
    ) -> SlackTable:
        """Return a table whose points are what a call returns for new tokens and those before."""
        points = [[measure(new, before) for before in prefix_tokens] for new in new_tokens]
        return cls(new_tokens, prefix_tokens, np.array(points, np.float64))

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The points, a copy."""
        with self._changing:
            return self._seconds.copy()

    def window(self, new_tokens: int, prefix_tokens: int) -> float | None:
        """Return C in seconds, None where nothing near is known."""
        corners = self._corners(new_tokens, prefix_tokens)
        with self._changing:
            found = sum(one.weight * self._seconds[one.row, one.column] for one in corners)
        return None if math.isnan(found) else max(0.0, float(found))

    def observe(self, new_tokens: int, prefix_tokens: int, seconds: float) -> None:
        """Learn what a layer took; points near it move by the share that they have in it.

        Points that were unknown become what it says, as if time went with the new tokens alone.
        """
        corners = self._corners(new_tokens, prefix_tokens)
        expected = self.window(new_tokens, prefix_tokens)
        with self._changing:
            for one in corners:
                at = one.row, one.column
                if math.isnan(self._seconds[at]):
                    self._seconds[at] = seconds * self.new_tokens[one.row] / max(1, new_tokens)
            if expected is None:
                return
            # The least change of points that makes them say what was seen.
            square = sum(one.weight**2 for one in corners)
            for one in corners:
                at = one.row, one.column
                step = _WEIGHT * (seconds - expected) * one.weight / square
                self._seconds[at] = max(0.0, self._seconds[at] + step)

    # --- as a file holds it ----------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return it as numbers and lists."""
        return {
            "new_tokens": list(self.new_tokens),
            "prefix_tokens": list(self.prefix_tokens),
            "seconds": [
                [None if math.isnan(one) else one for one in row] for row in self.seconds.tolist()
            ],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> SlackTable:
        """Return what `as_json` returned.

        Raises
        ------
        ValueError, KeyError, TypeError
            Where it is none of that.
        """
        points = [
            [math.nan if one is None else float(one) for one in row] for row in record["seconds"]
        ]
        seconds = np.array(points, np.float64)
        if (seconds < 0).any() or np.isinf(seconds).any():
            raise ValueError("windows must be 0 or more")
        return cls(
            [int(one) for one in record["new_tokens"]],
            [int(one) for one in record["prefix_tokens"]],
            seconds,
        )

    # --- inside ----------------------------------------------------------------------------

    def _corners(self, new_tokens: int, prefix_tokens: int) -> list[_Corner]:
        """Return the points around a place, with weights of sum 1; none of weight 0."""
        rows = _between(self.new_tokens, new_tokens)
        columns = _between(self.prefix_tokens, prefix_tokens)
        return [
            _Corner(row, column, own * other)
            for row, own in rows
            for column, other in columns
            if own * other
        ]


def _between(axis: tuple[int, ...], value: int) -> list[tuple[int, float]]:
    """Return both neighbours of a value on an axis, and what each weighs; beyond the ends, too."""
    low = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[low]) / (axis[low + 1] - axis[low])
    return [(low, 1 - share), (low + 1, share)]
