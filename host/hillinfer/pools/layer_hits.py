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
    """

    def __init__(self, layers: int) -> None:
        self._hot = [0] * layers
        self._cold = [0] * layers

    def add(self, entry: LayerStep) -> None:
        """Count one entry; entries of a layer come one at a time."""
        self._hot[entry.layer] += entry.hot_rows
        self._cold[entry.layer] += entry.cold_rows

    def copy(self) -> LayerHits:
        """Return what is counted now."""
        copy = LayerHits(len(self._hot))
        copy._hot, copy._cold = list(self._hot), list(self._cold)
        return copy

    def add_since(self, now: LayerHits, before: LayerHits) -> None:
        """Add what came between two moments of another count."""
        for own, new, old in (
            (self._hot, now._hot, before._hot),
            (self._cold, now._cold, before._cold),
        ):
            for layer, count in enumerate(new):
                own[layer] += count - old[layer]

    def rates(self) -> tuple[float, ...]:
        """Return each layer's share of selected rows found in DRAM; 1.0 where none was wanted."""
        return tuple(
            hot / (hot + cold) if hot + cold else 1.0
            for hot, cold in zip(self._hot, self._cold, strict=True)
        )
