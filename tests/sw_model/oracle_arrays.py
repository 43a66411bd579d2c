# SPDX-License-Identifier: Apache-2.0
"""Conversions between the oracle's plain lists and the golden model's arrays."""

import numpy as np

from hillinfer_model.channel_statistics import ChannelStatistics


def to_statistics(table, kv, d):
    """Return ChannelStatistics from the oracle's {(g, j): (c, M)}."""
    cells = [[table[g, j] for j in range(d)] for g in range(kv)]
    return ChannelStatistics(
        np.array([[c for c, _ in row] for row in cells], dtype=np.int8),
        np.array([[m for _, m in row] for row in cells], dtype=np.int32),
    )


def from_statistics(statistics):
    """Return the oracle's {(g, j): (c, M)} from ChannelStatistics."""
    return {
        (g, j): (int(c), int(statistics.means[g, j]))
        for (g, j), c in np.ndenumerate(statistics.exponents)
    }


def one_channel(c, mean):
    """Return both forms of the statistics of one KV head with one channel."""
    return to_statistics({(0, 0): (c, mean)}, 1, 1), {(0, 0): (c, mean)}


def flipped(array, index=0, bit=0):
    """Return a copy of an array with one bit of one element, counted flat, inverted."""
    copy = np.ascontiguousarray(array).copy()
    raw = copy.reshape(-1).view(f"u{copy.itemsize}")
    raw[index] ^= raw.dtype.type(1 << bit)
    return copy


def same(array, dtype, expected):
    """Say whether an array has this type, and the shape and numbers of a nested list."""
    return array.dtype == np.dtype(dtype) and array.tolist() == expected


def halves(values):
    """Return the FP16 codes of numbers, uint16."""
    return np.asarray(values, dtype=np.float16).view(np.uint16)
