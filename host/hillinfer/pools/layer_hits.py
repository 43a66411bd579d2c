# SPDX-License-Identifier: Apache-2.0
"""Hits and misses of each layer so far."""

from __future__ import annotations

import numpy as np

from hillinfer.pools.layer_step import LayerStep


class LayerHits:
    """Adds up the timeline, a layer each.

    Parameters
    ----------
    layers
        Layers of the model.
    """

    def __init__(self, layers: int) -> None:
        self._hot = np.zeros(layers, np.int64)
        self._cold = np.zeros(layers, np.int64)

    def add(self, entry: LayerStep) -> None:
        """Count one entry; entries of a layer come one at a time."""
        self._hot[entry.layer] += entry.hot_rows
        self._cold[entry.layer] += entry.cold_rows

    def rates(self) -> tuple[float, ...]:
        """Return each layer's share of selected rows found in DRAM; 1.0 where none was wanted."""
        wanted = self._hot + self._cold
        return tuple(np.where(wanted, self._hot / np.maximum(wanted, 1), 1.0).tolist())
