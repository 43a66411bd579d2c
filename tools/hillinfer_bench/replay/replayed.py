# SPDX-License-Identifier: Apache-2.0
"""What a pool held of the sets it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Replayed:
    """Hits of one trace, per layer; all arrays are int64 of shape (layers,).

    Parameters
    ----------
    selected
        Selected tokens of all steps, kept tokens included.
    hits
        Those found in DRAM, in the hot pool or in the open group, as `CacheStatistics` counts.
    in_open_group
        Those found in the open group, which is in DRAM whatever the policy.
    promoted, demoted
        Rows that became hot after they were read, and those that gave way to them.
    """

    selected: NDArray[np.int64]
    hits: NDArray[np.int64]
    in_open_group: NDArray[np.int64]
    promoted: NDArray[np.int64]
    demoted: NDArray[np.int64]

    @property
    def hit_rate(self) -> float:
        """Hits over selected tokens of all layers and steps."""
        return float(self.hits.sum() / self.selected.sum())

    @property
    def settled_hit_rate(self) -> float:
        """The same without the open group: the part that is up to the pool."""
        settled = self.selected - self.in_open_group
        return float((self.hits - self.in_open_group).sum() / settled.sum())

    @property
    def layer_hit_rates(self) -> NDArray[np.float64]:
        """Hit rate of each layer, float64 of shape (layers,)."""
        return np.asarray(self.hits / self.selected)
