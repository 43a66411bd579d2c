# SPDX-License-Identifier: Apache-2.0
"""The hot pools of all layers, inside what the budget leaves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.model_shape import ModelShape
from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.pools.hot_pool import SLOT_BYTES, HotPool
from hillinfer_model.kernel_spec import GROUP_TOKENS

TABLE_GROWTH_ROWS = 4096


class HotPools:
    """One hot pool per layer, all of the same size, giving way to whatever else M0 must hold.

    Parameters
    ----------
    shape
        The model's.
    accountant
        Counts the memory and says how much is left.
    policy
        Chooses whom to demote.
    """

    def __init__(self, shape: ModelShape, accountant: Accountant, policy: PoolPolicy) -> None:
        self._shape = shape
        self._accountant = accountant
        self._tails_bytes = 0
        self._covered_rows = 0
        self._slot_bytes = shape.row_bytes + SLOT_BYTES
        most_rows = max(0, accountant.bytes_for_hot_rows // (shape.layers * self._slot_bytes))
        self.layers = [HotPool(shape.row_bytes, most_rows, policy) for _ in range(shape.layers)]
        accountant.on_shortage(self._make_room)

    def capacity(self) -> int:
        """Slots each layer may use now."""
        left = self._accountant.bytes_for_hot_rows - self._tails_bytes
        return max(0, left // (self._shape.layers * self._slot_bytes))

    def cover(self, rows: int) -> None:
        """Make room in all tables for row numbers below `rows`."""
        if rows <= self._covered_rows:
            return
        grown = -(-rows // TABLE_GROWTH_ROWS) * TABLE_GROWTH_ROWS
        added = (grown - self._covered_rows) * np.dtype(np.int32).itemsize
        self._accountant.take(Part.OTHER, added * self._shape.layers)
        for pool in self.layers:
            pool.cover(grown)
        self._covered_rows = grown

    def take_tail(self) -> None:
        """Count the open group of one more sequence; it lies beside the slots."""
        size = GROUP_TOKENS * self._shape.token_bytes
        self._tails_bytes += size
        try:
            self._accountant.take(Part.HOT, size)
        except BaseException:
            self._tails_bytes -= size
            raise

    def give_tail(self) -> None:
        """Count one open group less."""
        size = GROUP_TOKENS * self._shape.token_bytes
        self._tails_bytes -= size
        self._accountant.give(Part.HOT, size)

    def admit(
        self, layer: int, rows: NDArray[np.int64], source: NDArray[np.uint8], step: int
    ) -> None:
        """Promote rows of one layer (see HotPool.admit)."""
        pool = self.layers[layer]
        before = pool.used_rows
        pool.admit(rows, source, step, self.capacity())
        self._accountant.take(Part.HOT, (pool.used_rows - before) * self._slot_bytes)

    def forget_group(self, group: int) -> None:
        """Drop a group's rows from all layers."""
        for pool in self.layers:
            pool.forget(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)

    def _make_room(self) -> None:
        capacity = self.capacity()
        for pool in self.layers:
            before = pool.used_rows
            pool.shrink(capacity)
            self._accountant.give(Part.HOT, (before - pool.used_rows) * self._slot_bytes)
