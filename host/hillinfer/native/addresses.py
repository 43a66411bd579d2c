# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie in memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Addresses:
    """Remembers the addresses of arrays that come again at every step, as long as they live.

    Asking numpy takes longer than scoring the tokens of a small model's segment does.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}

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
