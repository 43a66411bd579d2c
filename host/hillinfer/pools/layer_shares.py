# SPDX-License-Identifier: Apache-2.0
"""How the memory for hot rows is divided among layers."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class PoolSizes(StrEnum):
    """Whether all hot pools have the same size, or those with more misses a larger one."""

    EQUAL = "equal"
    MISSES = "misses"


class LayerShares:
    """The share of each layer, equal at first.

    Parameters
    ----------
    layers
        Layers of the model.
    sizes
        Whether shares follow measured misses.
    """

    # Half of the memory is divided equally, so that no layer starves while it happens to hit.
    _EQUAL_PART = 0.5
    _MOST = 3.0
    # How much of what was known before still counts.
    _MEMORY = 0.5

    def __init__(self, layers: int, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._misses = np.zeros(layers)
        self._shares = np.full(layers, 1 / layers)

    @property
    def largest(self) -> float:
        """The largest share there can be, as a multiple of an equal one."""
        return self._MOST if self.sizes is PoolSizes.MISSES else 1.0

    def share(self, layer: int) -> float:
        """Return a layer's share of all slots, 1 in all."""
        return float(self._shares[layer])

    def note_misses(self, misses: NDArray[np.int64]) -> None:
        """Learn how many cold rows each layer wanted since the last time, int64 (layers,)."""
        if self.sizes is PoolSizes.EQUAL:
            return
        self._misses = self._MEMORY * self._misses + misses
        total = float(self._misses.sum())
        layers = len(self._misses)
        by_misses = self._misses / total if total else np.full(layers, 1 / layers)
        shares = self._EQUAL_PART / layers + (1 - self._EQUAL_PART) * by_misses
        most = min(self._MOST / layers, 1.0)
        shares = np.minimum(shares, most)
        # What was cut off goes to the others, as far as each is from the most.
        room = most - shares
        left = 1 - float(shares.sum())
        self._shares = shares + room * (left / float(room.sum()) if left > 0 else 0)
