# SPDX-License-Identifier: Apache-2.0
"""The most hits that any policy could have had, knowing the future (Belady's optimum)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer_bench.replay.pool_replay import Replayed
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS

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


def demand_bound(trace: SelectionTrace, slots: int) -> Replayed:
    """Return the best that demand fetching can do with `slots` rows in every layer's pool."""
    hits = [
        sum(int(some.sum()) for some in most_hits(*_from_pool(trace, layer), capacity=slots))
        for layer in range(len(trace.layers))
    ]
    return _replayed(trace, np.asarray(hits, np.int64))


def shared_demand_bound(trace: SelectionTrace, slots: int) -> Replayed:
    """Return the best that demand fetching can do where layers share their slots.

    All layers together hold `slots` rows for each layer when a step begins.
    """
    layers = len(trace.layers)
    tokens = trace.prefix + trace.steps
    wanted, arriving = zip(*(_from_pool(trace, layer) for layer in range(layers)), strict=True)
    uses, arrivals = (
        [
            np.concatenate([own[step] + layer * tokens for layer, own in enumerate(columns)])
            for step in range(trace.steps)
        ]
        for columns in (wanted, arriving)
    )
    hits = np.zeros(layers, np.int64)
    for items, hit in zip(uses, most_hits(uses, arrivals, slots * layers), strict=True):
        hits += np.bincount(items[hit] // tokens, minlength=layers)
    return _replayed(trace, hits)


def prefetch_bound(trace: SelectionTrace, rows: int) -> float:
    """Return the hit rate where everything is prefetched into `rows` rows: 1 if they hold a set."""
    held = sum(min(rows, len(positions)) for sets in trace.layers for positions in sets)
    return held / trace.selected


def _from_pool(
    trace: SelectionTrace, layer: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return per step what the hot pool is asked for, and the rows that left the open group."""
    uses, arrivals, settled = [], [], 0
    for step, positions in enumerate(trace.layers[layer]):
        tail_start = (trace.prefix + step + 1) // GROUP_TOKENS * GROUP_TOKENS
        uses.append(positions[positions < tail_start].astype(np.int64))
        arrivals.append(np.arange(settled, tail_start))
        settled = tail_start
    return uses, arrivals


def _replayed(trace: SelectionTrace, pool_hits: NDArray[np.int64]) -> Replayed:
    selected = [sum(map(len, sets)) for sets in trace.layers]
    settled = [sum(map(len, _from_pool(trace, layer)[0])) for layer in range(len(trace.layers))]
    in_open_group = np.asarray(selected) - np.asarray(settled)
    none = np.zeros_like(pool_hits)
    return Replayed(np.asarray(selected), pool_hits + in_open_group, in_open_group, none, none)
