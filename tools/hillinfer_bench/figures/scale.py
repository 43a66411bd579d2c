# SPDX-License-Identifier: Apache-2.0
"""Scales of axes, after the values that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Where values differ more, the small ones cannot be told apart on a linear scale.
_LARGE_RATIO = 10
# Above the largest value there is room for words.
_ROOM = 0.3


def scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Scale the upright axis for positive values: from 0, or logarithmic where ratios are large."""
    least, most = min(values), max(values)
    if 0 < least * _LARGE_RATIO < most:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        low = least / 1.5
        axes.set_ylim(low, most * (most / low) ** _ROOM)
        # A decade alone has too few ticks to read values by.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
    else:
        axes.set_ylim(0, most * (1 + _ROOM))


def name_places(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Give a logarithmic axis of base 2 ticks at these places and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, names)
    axes.set_xticks([], minor=True)
