# SPDX-License-Identifier: Apache-2.0
"""Float32 arithmetic whose every rounding is prescribed (contract, section 16)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LANES = 16


def fused_multiply_add(left: Floats, right: Floats, addend: Floats) -> Floats:
    """Return left · right + addend, rounded once to float32.

    Parameters
    ----------
    left, right, addend
        float32, broadcast against each other.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        # The product of two float32 is exact in float64.
        product = left.astype(np.float64) * right.astype(np.float64)
        other = addend.astype(np.float64)
        total = product + other
        # What rounding the sum lost, exactly (Knuth's two-sum).
        back = total - product
        lost = (product - (total - back)) + (other - back)
        # Rounding an inexact float64 to an odd last bit makes the second rounding harmless.
        even = (total.view(np.int64) & 1) == 0
        towards = np.where(lost > 0, np.inf, -np.inf)
        odd = np.where((lost != 0) & even & np.isfinite(total), np.nextafter(total, towards), total)
        return np.asarray(odd.astype(np.float32))


def inner_products(query: Floats, keys: Floats) -> Floats:
    """Return inner products over the last axis, in sixteen lanes (contract, section 16).

    Parameters
    ----------
    query
        float32 of shape (heads, head_dim).
    keys
        float32 of shape (tokens, head_dim).

    Returns
    -------
    float32 of shape (heads, tokens).
    """
    missing = -query.shape[1] % LANES
    left = np.pad(query, ((0, 0), (0, missing)))[:, np.newaxis]
    right = np.pad(keys, ((0, 0), (0, missing)))[np.newaxis]
    sums = np.zeros((query.shape[0], keys.shape[0], LANES), dtype=np.float32)
    for first in range(0, left.shape[2], LANES):
        part = slice(first, first + LANES)
        sums = fused_multiply_add(left[:, :, part], right[:, :, part], sums)
    with np.errstate(invalid="ignore", over="ignore"):
        while sums.shape[2] > 1:
            half = sums.shape[2] // 2
            sums = sums[:, :, :half] + sums[:, :, half:]
    return np.asarray(sums[:, :, 0])
