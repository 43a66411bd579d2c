# SPDX-License-Identifier: Apache-2.0
"""Rows to promote, and moments to do it in, for tests of the pools."""

import numpy as np

from hillinfer.kv.hot_pool import Candidates, PoolMoment

FAR = 1 << 20


def content(rows, row_bytes):
    """Return bytes that tell every row below 255 from every other, uint8 (rows, row_bytes)."""
    return np.repeat(np.asarray(rows, np.int64).astype(np.uint8)[:, None] + 1, row_bytes, axis=1)


def candidates(rows, row_bytes, counts=0, positions=None):
    """Return rows as they lie in a buffer that holds others too, in another order."""
    rows = np.asarray(rows, np.int64)
    source = np.zeros((2 * len(rows) + 1, row_bytes), np.uint8)
    places = 2 * np.arange(len(rows))[::-1]
    source[places] = content(rows, row_bytes)
    return Candidates(
        rows=rows,
        positions=np.asarray(rows if positions is None else positions, np.int32),
        counts=np.broadcast_to(np.asarray(counts, np.uint16), len(rows)).copy(),
        source=source,
        places=places,
    )


def at(step, length=FAR, sinks=0, recent=1, alpha=0.1):
    """Return a moment in which, as a rule, no row of a test is kept or pinned."""
    return PoolMoment(step, length, alpha, sinks, recent)
