# SPDX-License-Identifier: Apache-2.0
"""Traces with the locality of real ones, made of random numbers."""

from dataclasses import replace

import numpy as np

from hillinfer.settings import Settings
from hillinfer_bench.replay.code_split import CodedTrace
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.selection import kept_positions, selected_count

SETTINGS = Settings().changed(alpha=0.1, block_rows=64)


def random_trace(prefix=1100, steps=40, layers=2, seed=0, settings=SETTINGS, text="random"):
    """Return sets that change slowly, each layer's by a walk of its own over token scores."""
    random = np.random.default_rng(seed)
    made, observed = [], []
    for _ in range(layers):
        scores = random.standard_normal(prefix + steps)
        sets = []
        for length in (*([prefix] * 16), *range(prefix + 1, prefix + steps + 1)):
            scores += 0.3 * random.standard_normal(len(scores))
            own = scores[:length].copy()
            own[kept_positions(length, settings.kept_sinks, settings.kept_recent)] = np.inf
            count = selected_count(length, settings.alpha, settings.kept_tokens, None)
            sets.append(np.sort(np.argsort(-own)[:count]).astype(np.int32))
        observed.append(tuple(sets[:16]))
        made.append(tuple(sets[16:]))
    return SelectionTrace(text, settings, prefix, tuple(made), tuple(observed))


def coded(trace, count=50):
    """Call the kept tokens exact, and as many others of each set as make `count`."""
    layers = []
    for sets in trace.layers:
        own = []
        for step, positions in enumerate(sets):
            length = trace.prefix + step + 1
            kept = kept_positions(length, trace.settings.kept_sinks, trace.settings.kept_recent)
            others = np.setdiff1d(positions, kept)
            own.append(np.sort(np.append(kept, others[: count - len(kept)])).astype(np.int32))
        layers.append(tuple(own))
    settings = trace.settings.changed(exact=0.02, exact_floor=count)
    return CodedTrace(replace(trace, settings=settings), tuple(layers))
