# SPDX-License-Identifier: Apache-2.0
"""Where the timeline's entries go when their attention has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hillinfer.counters import Counters
from hillinfer.pools.hot_pools import HotPools
from hillinfer.pools.layer_hits import LayerHits
from hillinfer.pools.layer_step import LayerStep


class LayerStepLog:
    """Counts entries, and hands each on once what it promoted has been.

    Parameters
    ----------
    pools
        Know when promotions have ended.
    counters
        Where hot and cold rows are counted.
    layer_hits
        Where they are counted by layer.
    observe
        Called with the entry of each layer and step, from any thread; None where nobody is.
    """

    def __init__(
        self,
        pools: HotPools,
        counters: Counters,
        layer_hits: LayerHits,
        observe: Callable[[LayerStep], None] | None,
    ) -> None:
        self._pools = pools
        self._counters = counters
        self._layer_hits = layer_hits
        self._observe = observe

    def end(self, entry: LayerStep) -> None:
        """Take an entry over whose rows have all been looked at."""
        self._counters.hot_rows_read += entry.hot_rows
        self._counters.cold_rows_read += entry.cold_rows
        self._counters.drive_wait_seconds += entry.wait_seconds
        self._layer_hits.add(entry)
        if self._observe is not None:
            self._pools.when_settled(entry.layer, partial(self._observe, entry))

    def end_hot(self, step: int, layer: int, length: int, rows: int) -> None:
        """Take over that so many rows of a layer were looked at in a step, all of them hot."""
        if self._observe is not None:
            self.end(LayerStep(step, layer, length, rows))
            return
        self._counters.hot_rows_read += rows
        self._layer_hits.hot[layer] += rows
