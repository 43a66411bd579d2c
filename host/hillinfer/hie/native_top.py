# SPDX-License-Identifier: Apache-2.0
"""The exact top of selected sets whose tuples are there as a whole, in C++."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.native.library import native_library


def native_top(
    tuples: NDArray[np.uint32], count: int, kept: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the selected positions: the kept ones and the best others (contract, section 4).

    Parameters
    ----------
    tuples
        uint32 of shape (N,): the tuples of positions 0 .. N-1 in order.
    count
        Tokens to select, the kept ones included.
    kept
        int64, ascending, distinct: selected whatever their score.

    Returns
    -------
    int64 of shape (count,), ascending.

    Raises
    ------
    ValueError
        Another type or order, or `count` smaller than the kept tokens or larger than N.
    """
    if tuples.dtype != np.uint32 or tuples.ndim != 1 or kept.dtype != np.int64 or kept.ndim != 1:
        raise ValueError("tuples are uint32 and kept positions int64, one behind the other")
    if kept.size and (kept[0] < 0 or kept[-1] >= tuples.size or np.any(kept[1:] <= kept[:-1])):
        raise ValueError(f"kept positions must ascend within 0..{tuples.size - 1}")
    if not kept.size <= count <= tuples.size:
        raise ValueError(f"count={count} is outside {kept.size}..{tuples.size}")
    tuples, kept = np.ascontiguousarray(tuples), np.ascontiguousarray(kept)
    chosen = np.empty(count, dtype=np.int64)
    native_library().call(
        "hillinfer_select",
        tuples.ctypes.data,
        tuples.size,
        kept.ctypes.data,
        kept.size,
        count,
        chosen.ctypes.data,
    )
    return chosen
