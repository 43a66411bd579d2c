# SPDX-License-Identifier: Apache-2.0
"""The order in which systems decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Steps of one system without another's in between.

    Parameters
    ----------
    system
        Number of the system.
    first, end
        Steps first <= step < end.
    """

    system: int
    first: int
    end: int


def turns(systems: int, steps: int, length: int, warm_up: int = 0) -> Iterator[Turn]:
    """Yield turns until every system has done all steps.

    Every round another system begins, so that none has always the same neighbour before it, and
    what else the machine does falls on all of them.

    Parameters
    ----------
    systems
        How many.
    steps
        Of each, warm-up included.
    length
        Steps of a turn.
    warm_up
        Steps of a first turn of each.
    """
    first, number = 0, 0
    while first < steps:
        end = min(steps, warm_up if first < warm_up else first + length)
        for place in range(systems):
            yield Turn((number + place) % systems, first, end)
        first, number = end, number + 1
