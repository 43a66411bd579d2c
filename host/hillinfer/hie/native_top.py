# SPDX-License-Identifier: Apache-2.0
"""The exact top of selected sets whose tuples are there as a whole, in C++."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.hie.wanted import Wanted
from hillinfer.native.library import native_library
from hillinfer.native.structures import Quota


def native_top(
    tuples: NDArray[np.uint32], wanted: Wanted, coming: int = 0
) -> list[NDArray[np.int64]]:
    """Return the selected sets: the kept positions and the best others (contract, section 4).

    Parameters
    ----------
    tuples
        uint32 of shape (sets, N): those of positions 0 .. N-1 in order.
    wanted
        Of N and what is coming.
    coming
        As for `Scorer.score`; what is coming is the last of each set.

    Returns
    -------
    One ascending int64 array of positions per set.

    Raises
    ------
    ValueError
        Another type or order, more is wanted than there is, or less than is kept.
    """
    if tuples.dtype != np.uint32 or tuples.ndim != 2:
        raise ValueError("tuples are uint32, those of one set behind the other's")
    sets, tokens = tuples.shape
    wanted.check(tokens + coming, coming)
    tuples = np.ascontiguousarray(tuples)
    chosen = np.empty((sets, wanted.count), dtype=np.int64)
    quota = Quota(coming, wanted.sinks, wanted.recent, wanted.count)
    native_library().call(
        "hillinfer_select",
        tuples.ctypes.data,
        sets,
        tokens,
        ctypes.byref(quota),
        torch.get_num_threads(),
        chosen.ctypes.data,
    )
    return list(chosen)
