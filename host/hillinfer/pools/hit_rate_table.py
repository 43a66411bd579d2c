# SPDX-License-Identifier: Apache-2.0
"""How often each token was selected."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HIT_BYTES = 2
GROWTH_TOKENS = 1024


class HitRateTable:
    """2 bytes per token and layer of one sequence (HillInfer section 5.4).

    What they mean is the pool policy's matter; none lets them overflow.

    Parameters
    ----------
    layers
        Layers of the model.
    """

    def __init__(self, layers: int) -> None:
        # One array per layer: growing one never needs a second copy of all.
        self.counts: list[NDArray[np.uint16]] = [np.zeros(0, np.uint16) for _ in range(layers)]
        # Asking numpy takes long, and every layer would at every step.
        self.addresses = [0] * layers

    @property
    def byte_count(self) -> int:
        """Memory of the table."""
        return sum(counts.nbytes for counts in self.counts)

    def growth_bytes(self, layer: int, tokens: int) -> int:
        """Return by how much `cover` would grow the table."""
        return max(0, room_for(tokens) - len(self.counts[layer])) * HIT_BYTES

    def cover(self, layer: int, tokens: int) -> None:
        """Make room for a layer's positions below `tokens`, with no hits yet."""
        counts = self.counts[layer]
        if tokens > len(counts):
            grown = np.zeros(room_for(tokens), np.uint16)
            grown[: len(counts)] = counts
            self.counts[layer], self.addresses[layer] = grown, grown.ctypes.data

    def forget(self, length: int) -> None:
        """Drop the hits of positions from `length` on."""
        for counts in self.counts:
            counts[length:] = 0

    def copy(self) -> HitRateTable:
        """Return a table with the same hits that goes on by itself."""
        copy = HitRateTable(0)
        copy.counts = [counts.copy() for counts in self.counts]
        copy.addresses = [counts.ctypes.data for counts in copy.counts]
        return copy


def room_for(tokens: int) -> int:
    """Return the entries that a layer's table has for so many tokens."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS
