# SPDX-License-Identifier: Apache-2.0
"""A trace played to the product's own pools."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.pool_policies import LayerShares, PoolPolicy
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.tables import HIT_BYTES, room_for
from hillinfer.settings import PoolSizes
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import LayerStep
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_model.kernel_spec import GROUP_TOKENS


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


_CHUNK_TOKENS = 1024
_TABLE_ITEM_BYTES = 4


class PoolReplay:
    """Keeps the pools of one trace as a `Runtime` would, with rows of no content and no drive.

    `PoolManager`, `HotPools` and `Sequence` are the product's; what is done here is what
    `Runtime` and `Gather` do with them in the same order, blocks included.

    Parameters
    ----------
    trace
        What is asked for.
    policy
        Ranks rows.
    slots
        Rows that all hot pools hold together, per layer; the open groups lie beside them.
    sizes
        How they are divided among the layers.
    """

    def __init__(
        self, trace: SelectionTrace, policy: PoolPolicy, slots: int, sizes: PoolSizes
    ) -> None:
        layers = len(trace.layers)
        shape = ModelShape(layers, 1, 1, 1, StoredType.FLOAT16, trace.prefix + trace.steps)
        rows = round_up(trace.prefix + trace.steps, GROUP_TOKENS)
        tables = layers * (
            round_up(rows, TABLE_GROWTH_ROWS) * _TABLE_ITEM_BYTES + room_for(rows) * HIT_BYTES
        )
        self._trace = trace
        self._accountant = Accountant(
            tables
            + GROUP_TOKENS * shape.token_bytes
            + slots * layers * (shape.row_bytes + SLOT_BYTES)
        )
        self._pools = HotPools(shape, self._accountant, policy, LayerShares(layers, sizes))
        self._counters = Counters()
        self._manager = PoolManager(self._pools, policy, trace.settings, self._counters)
        self._sequence = Sequence(layers, shape.row_bytes)
        self._sequence.append_groups(range(rows // GROUP_TOKENS))
        # What grows during a run is taken at once: the pools then have all the rest to the row.
        self._accountant.take(Part.OTHER, tables)
        self._pools.take_tail()
        for layer, pool in enumerate(self._pools.layers):
            pool.cover(rows)
            self._sequence.hits.cover(layer, rows)
        self._block_rows = trace.settings.block_rows
        self._rows = np.zeros((max(self._block_rows, _CHUNK_TOKENS), shape.row_bytes), np.uint8)
        self._step = 0

    def run(self) -> Replayed:
        """Read the prefix, play every step and return what was found."""
        trace, layers = self._trace, len(self._trace.layers)
        try:
            for start in range(0, trace.prefix, _CHUNK_TOKENS):
                self._begin_step()
                for layer in range(layers):
                    self._append(layer, min(_CHUNK_TOKENS, trace.prefix - start))
            selected, hits, in_open, promoted, demoted = np.zeros((5, layers), np.int64)
            for step in range(trace.steps):
                self._begin_step()
                for layer in range(layers):
                    positions = trace.layers[layer][step].astype(np.int64)
                    self._append(layer, 1)
                    for observed in trace.observed[layer] if step == 0 else ():
                        self._manager.tally(layer, self._sequence, observed.astype(np.int64))
                    entry = self._read(layer, positions)
                    selected[layer] += len(positions)
                    hits[layer] += entry.hot_rows
                    in_open[layer] += (positions >= self._sequence.tail_start(layer)).sum()
                    self._pools.settle(layer)
                    promoted[layer] += entry.promoted
                    demoted[layer] += entry.demoted
        finally:
            self._pools.close()
        return Replayed(selected, hits, in_open, promoted, demoted)

    def _begin_step(self) -> None:
        self._step += 1
        self._manager.begin_step(self._step)

    def _append(self, layer: int, tokens: int) -> None:
        """Lengthen a layer and offer the groups that become full, block by block."""
        length = self._sequence.lengths[layer]
        first, end = self._sequence.tail_start(layer), length + tokens
        most = round_up(self._block_rows, GROUP_TOKENS)
        for start in range(first, end // GROUP_TOKENS * GROUP_TOKENS, most):
            full = np.arange(start, min(start + most, end // GROUP_TOKENS * GROUP_TOKENS))
            self._manager.offer_written(
                layer, self._sequence, full, self._rows[: len(full)], self._step
            )
            self._sequence.set_length(layer, int(full[-1]) + 1, first)
        self._sequence.set_length(layer, end, end // GROUP_TOKENS * GROUP_TOKENS)

    def _read(self, layer: int, positions: NDArray[np.int64]) -> LayerStep:
        """Find the rows of a selected set and offer those that were cold."""
        sequence, pool = self._sequence, self._pools.layers[layer]
        self._manager.begin_in_place(layer, sequence, positions, self._step)
        entry = LayerStep(self._step, layer, sequence.lengths[layer])
        for start in range(0, len(positions), self._block_rows):
            block = positions[start : start + self._block_rows]
            settled = block[block < sequence.tail_start(layer)]
            cold = np.flatnonzero(pool.slots(sequence.rows(settled)) < 0)
            entry.hot_rows += len(block) - len(cold)
            entry.cold_rows += len(cold)
            if len(cold):
                self._manager.offer_read(entry, sequence, block[cold], self._rows, cold).result()
        return entry
