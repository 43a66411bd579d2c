# SPDX-License-Identifier: Apache-2.0
"""The most hits that any policy could have had, knowing the future (Belady's optimum)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NEVER = np.iinfo(np.int64).max


def most_hits(
    uses: Sequence[NDArray[np.int64]], arrivals: Sequence[NDArray[np.int64]], capacity: int
) -> list[NDArray[np.bool_]]:
    """Return which uses hit when demand fetching is as good as it can be.

    An item may enter the pool when it was just used or when it arrives, at no cost, and must
    have stayed ever since to be hit; nothing is prefetched and nothing has to be admitted. So an
    item that is worth holding is held from one use to the next, and the question is how many of
    these intervals fit when at most `capacity` overlap at any step: giving up the one that ends
    furthest in the future, whenever there are too many, is optimal.

    Parameters
    ----------
    uses
        Per step, int64 items from 0 on that are wanted from the pool, each once.
    arrivals
        Per step, int64 items that may be in the pool from this step on, before its uses, and were
        not there before.
    capacity
        Items that the pool holds when a step begins.

    Returns
    -------
    Per step, a bool for each of its uses.
    """
    items = 1 + max((int(some.max()) for some in (*uses, *arrivals) if len(some)), default=-1)
    next_uses, first_uses = _next_uses(uses, arrivals, items)
    held_until = np.full(items, _NEVER)
    hits = []
    for step, wanted in enumerate(uses):
        held_until[arrivals[step]] = first_uses[step]
        _give_up(held_until, capacity)
        hits.append(held_until[wanted] == step)
        # What was missed is read now, so it may be held from here on as well.
        held_until[wanted] = next_uses[step]
    return hits


def _give_up(held_until: NDArray[np.int64], capacity: int) -> None:
    """Let go of what is used furthest in the future until no more than `capacity` are held."""
    held = np.flatnonzero(held_until != _NEVER)
    if capacity == 0:
        held_until[held] = _NEVER
    elif len(held) > capacity:
        sooner_first = np.argpartition(held_until[held], capacity - 1)
        held_until[held[sooner_first[capacity:]]] = _NEVER


def _next_uses(
    uses: Sequence[NDArray[np.int64]], arrivals: Sequence[NDArray[np.int64]], items: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return per step when its uses come again, and when its arrivals are used first."""
    upcoming = np.full(items, _NEVER)
    again, first = [], []
    for step in reversed(range(len(uses))):
        again.append(upcoming[uses[step]])
        upcoming[uses[step]] = step
        first.append(upcoming[arrivals[step]])
    return again[::-1], first[::-1]
