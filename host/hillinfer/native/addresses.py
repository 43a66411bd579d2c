# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie in memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


def row_addresses(memory: NDArray[np.uint8], rows: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return where rows of a C-contiguous uint8 array (rows, row_bytes) lie, as uint64.

    Raises
    ------
    ValueError
        The array has gaps or is not of rows.
    IndexError
        A row is not in it.
    """
    if memory.ndim != 2 or not memory.flags.c_contiguous:
        raise ValueError(f"rows of shape {memory.shape} must lie in one contiguous 2-D array")
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(memory)):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(memory)}")
    steps = rows.astype(np.uint64) * np.uint64(memory.shape[1])
    return np.asarray(steps + np.uint64(memory.ctypes.data))


class Addresses:
    """Remembers the addresses of arrays that come again at every step, as long as they live.

    Asking numpy takes longer than scoring the tokens of a small model's segment does.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}

    def __len__(self) -> int:
        """Return how many arrays it remembers."""
        return len(self._known)

    def of(self, array: NDArray[Any]) -> int:
        """Return the address of the first byte of a C-contiguous array.

        Raises
        ------
        ValueError
            The array has gaps.
        """
        key = id(array)
        known = self._known.get(key)
        if known is not None and known[0]() is array:
            return known[1]
        if not array.flags.c_contiguous:
            raise ValueError("the native library reads contiguous arrays; use ascontiguousarray")
        address: int = np.asarray(array).ctypes.data
        forget = self._known

        def drop(dead: weakref.ref[NDArray[Any]]) -> None:
            # Another array may have the same id by now.
            if forget.get(key, (None, 0))[0] is dead:
                del forget[key]

        self._known[key] = (weakref.ref(array, drop), address)
        return address
