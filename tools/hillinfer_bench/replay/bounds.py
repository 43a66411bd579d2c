# SPDX-License-Identifier: Apache-2.0
"""Belady's bounds of a trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_bench.replay.belady import most_hits
from hillinfer_bench.replay.replayed import Replayed
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS


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
