# SPDX-License-Identifier: Apache-2.0
"""Hit counts: of every token of a sequence, of every layer, and what pools were told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hillinfer.kv.hot_pool import HotPool
    from hillinfer.kv.sequence import Sequence
    from hillinfer.trace.pool_timeline import LayerStep

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


class UntoldHits:
    """Tells pools what hits are now only once they are about to rank their rows.

    To tell costs as much as looking at every hot row, and as long as all selected rows are hot
    nothing is ranked. Ranks are those of pools that are told at once.

    Parameters
    ----------
    pools
        One per layer.
    """

    def __init__(self, pools: list[HotPool]) -> None:
        self._pools = pools
        # Tokens in full groups and context length of each sequence, the one noted last at the end.
        self._untold: list[dict[Sequence, tuple[int, int]]] = [{} for _ in pools]

    def note(self, layer: int, sequence: Sequence, settled: int, length: int) -> None:
        """Note that a sequence's hits in a layer have changed.

        Parameters
        ----------
        layer, sequence
            Whose hits; they stay as they are until the next note, or `tell` comes first.
        settled, length
            Its tokens in full groups, and its context length N.
        """
        untold = self._untold[layer]
        # Of rows that several sequences share the pool knows what it was told last.
        untold.pop(sequence, None)
        untold[sequence] = settled, length

    def tell(self, layer: int) -> None:
        """Tell a layer's pool everything noted, in that order."""
        untold = self._untold[layer]
        if untold:
            self._untold[layer] = {}
            pool = self._pools[layer]
            for sequence, (settled, length) in untold.items():
                pool.refresh(sequence.rows, settled, sequence.hits.counts[layer], length)

    def tell_of(self, layer: int, sequence: Sequence) -> None:
        """Do so before a sequence's hits or rows change in a way that is not noted."""
        if sequence in self._untold[layer]:
            self.tell(layer)


class LayerHits:
    """Adds up the timeline, a layer each.

    Parameters
    ----------
    layers
        Layers of the model.

    Attributes
    ----------
    hot, cold
        By layer, selected rows found in DRAM and on the drive.
    """

    def __init__(self, layers: int) -> None:
        self.hot = [0] * layers
        self.cold = [0] * layers

    def add(self, entry: LayerStep) -> None:
        """Count one entry; entries of a layer come one at a time."""
        self.hot[entry.layer] += entry.hot_rows
        self.cold[entry.layer] += entry.cold_rows

    def copy(self) -> LayerHits:
        """Return what is counted now."""
        copy = LayerHits(len(self.hot))
        copy.hot, copy.cold = list(self.hot), list(self.cold)
        return copy

    def add_since(self, now: LayerHits, before: LayerHits) -> None:
        """Add what came between two moments of another count."""
        for own, new, old in (
            (self.hot, now.hot, before.hot),
            (self.cold, now.cold, before.cold),
        ):
            for layer, count in enumerate(new):
                own[layer] += count - old[layer]

    def rates(self) -> tuple[float, ...]:
        """Return each layer's share of selected rows found in DRAM; 1.0 where none was wanted."""
        return tuple(
            hot / (hot + cold) if hot + cold else 1.0
            for hot, cold in zip(self.hot, self.cold, strict=True)
        )
