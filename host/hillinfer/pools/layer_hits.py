# SPDX-License-Identifier: Apache-2.0
"""Hits and misses of each layer so far."""

from __future__ import annotations

from hillinfer.pools.layer_step import LayerStep


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
