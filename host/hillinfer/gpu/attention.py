# SPDX-License-Identifier: Apache-2.0
"""Attention over selected rows that were gathered in a GPU's memory."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.softmax_merge import SoftmaxMerge, compute_type
from hillinfer.gpu.coded import StagedCoded
from hillinfer.gpu.copies import (
    ArrivingRows,
    BroughtQueries,
    CopiedRows,
    CopiesAhead,
    IncomingRows,
    StagedStates,
)
from hillinfer.gpu.staging import (
    QUERY_BUFFERS,
    ROW_BUFFERS,
    CopyLane,
    StagingMemory,
    StagingPlan,
    StagingRing,
)
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import RowLayout, Sequence
from hillinfer.native.library import native_library
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- Attention over gathered rows ---

# Bounds what widening takes of the GPU. Never derived from budget or placement: it changes bits.
TILE_ROWS = 4096


class GatheredAttention:
    """Attends to all selected rows at once, where the model computes (HillInfer, section 4.3).

    A few large kernels instead of many small ones: the rows of a selection lie in one array, in
    ascending position, whatever came ahead of time and whatever did not. `gather` brings rows
    together or tells where they lie, and `states` takes keys and values out of them.
    """

    def __init__(
        self,
        lane: CopyLane,
        ring: StagingRing,
        gather: Gather,
        states: StagedStates,
        recorder: Recorder = SILENT,
    ) -> None:
        self._lane = lane
        self._ring = ring
        self._gather = gather
        self._states = states
        self._recorder = recorder

    def selected(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: list[NDArray[np.int64]],
        scaling: float,
        step: int,
        landed: LandedRows | None,
        copied: Future[CopiedRows] | None,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to selected rows and let those that were cold become hot.

        Parameters
        ----------
        layer, sequence, query, sets, scaling, step, landed
            As in `RowAttention.selected`.
        copied
            What of the rows was sent ahead, or None.
        newest
            The newest token's row, uint8 (1, row_bytes) beside the model, where the host does not
            have it yet; then `copied` is there, too.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        row_bytes = sequence.tails.shape[2]
        if copied is None:
            incoming = IncomingRows(self._lane, self._ring, len(union), row_bytes)
            with closing(self._gather.copied(layer, sequence, union, step, landed)) as blocks:
                for _, block in blocks:
                    incoming.add(block)
            rows = self._states.taken(incoming)
        else:
            ahead = copied.result()
            rows = self._completed(layer, sequence, union, step, landed, ahead, newest)
        with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
            wide = query.to(compute_type(query))
            merges = [SoftmaxMerge(heads, scaling) for heads in wide.chunk(len(sets))]
            for head, (merge, positions) in enumerate(zip(merges, sets, strict=True)):
                inside = None if len(sets) == 1 else np.searchsorted(union, positions)
                for start in range(0, len(positions), TILE_ROWS):
                    tile = slice(start, start + TILE_ROWS)
                    own = rows[tile] if inside is None else rows[_on(rows, inside[tile])]
                    keys, values = self._states.split(own, wide)
                    if inside is not None:
                        keys, values = keys[head : head + 1], values[head : head + 1]
                    merge.add_block(keys, values)
            return torch.cat([merge.result() for merge in merges]).to(query.dtype)

    def _completed(
        self,
        layer: int,
        sequence: Sequence,
        union: NDArray[np.int64],
        step: int,
        landed: LandedRows | None,
        ahead: CopiedRows,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return all rows in ascending position, after bringing those that were not sent ahead.

        Rows sent ahead are hits, stamped and promoted like all others.
        """
        if union[-1] != sequence.lengths[layer] - 1:
            newest = None
        here = np.isin(union, ahead.positions, assume_unique=True)
        late = ~here
        if newest is not None:
            late[len(union) - 1] = False
        row_bytes = sequence.tails.shape[2]
        incoming = IncomingRows(self._lane, self._ring, int(late.sum()), row_bytes)
        fetched = self._gather.in_place(layer, sequence, union, step, landed, GROUP_TOKENS)
        with closing(fetched) as runs:
            start = 0
            for addresses in runs:
                wanted = addresses[late[start : start + len(addresses)]]
                start += len(addresses)
                for first in range(0, len(wanted), incoming.piece_rows):
                    piece = wanted[first : first + incoming.piece_rows]
                    incoming.fill(len(piece), partial(native_library().copy_rows, piece))
        parts = [self._states.taken(ahead.rows), self._states.taken(incoming)]
        order = np.concatenate([np.flatnonzero(here), np.flatnonzero(late)])
        if newest is not None:
            parts.append(newest)
            order = np.append(order, len(union) - 1)
        rows = torch.cat([part for part in parts if len(part)])
        if np.array_equal(order, np.arange(len(order))):
            return rows
        return rows[_on(rows, np.argsort(order))]


def _on(rows: torch.Tensor, index: NDArray[np.int64]) -> torch.Tensor:
    # Read from pageable memory before this returns, without waiting for what the GPU is at.
    return torch.from_numpy(index).to(rows.device, non_blocking=True)


# --- All that a model on a GPU needs ---


class GpuSide:
    """Staging buffers, the lane that copies, and attention over what it copied.

    `lane` leads to the model's GPU and is closed with this; `plan` is how staging memory is
    divided.

    Attributes
    ----------
    attention, coded, states, ahead, arrivals, queries
        The parts, each for one way that bytes take.
    rings
        Their buffers: for rows, for those of new tokens that come back, and for queries.
    """

    def __init__(
        self,
        lane: CopyLane,
        plan: StagingPlan,
        gather: Gather,
        layout: RowLayout,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._lane = lane
        self._memory = StagingMemory(lane, plan.byte_count)
        # What the report says, also after the end.
        self.staging_kind = self._memory.kind
        self.staging_bytes = plan.byte_count
        row_bytes = plan.row_bytes
        rows = StagingRing(self._memory.cut(ROW_BUFFERS, plan.buffer_rows * row_bytes))
        arriving = StagingRing(self._memory.cut(plan.arriving_rows, row_bytes))
        queries = StagingRing(self._memory.cut(QUERY_BUFFERS, plan.query_bytes))
        self.rings = [rows, arriving, queries]
        self.states = StagedStates(layout, counters, lane, rows)
        self.attention = GatheredAttention(lane, rows, gather, self.states, recorder)
        self.coded = StagedCoded(lane, rows, self.states, row_bytes)
        self.ahead = CopiesAhead(lane, rows, gather, row_bytes, recorder)
        self.arrivals = ArrivingRows(lane, arriving)
        self.queries = BroughtQueries(lane, queries)

    def stop(self) -> None:
        """Stop looking at rows, and wait for the copies that were asked for."""
        self.ahead.close()
        for ring in self.rings:
            ring.close()

    def close(self) -> None:
        """Give the memory back, after `stop`; raises where the GPU failed."""
        try:
            self._lane.close()
        finally:
            # Before it goes: a GPU must not know pages of memory that is somebody else's.
            self._memory.close()
