# SPDX-License-Identifier: Apache-2.0
"""Attention in a GPU's memory: over gathered rows, and over exact rows and coded tokens."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import SoftmaxMerge, compute_type
from hillinfer.attention.torch_coded import TorchCodedAttention, TorchCodedTokens, unpack_code_rows
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
from hillinfer.scoring.coded import Weighed
from hillinfer.shadow.values import SegmentValues
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes

# --- Attention over exact rows and coded tokens (contract, section 16) ---

_ALIGNED_BYTES = 4


@dataclass(frozen=True)
class CodedSet:
    """The coded tokens of a set, on the host.

    Positions are int64, ascending; `code_rows` are uint64 addresses of their code rows, exponents
    behind; `weighed` is L' of all query heads, and invalid keys.
    """

    positions: NDArray[np.int64]
    code_rows: NDArray[np.uint64]
    weighed: Weighed


class StagedCoded:
    """Brings rows, codes and L' to a GPU and attends there, with the bits of any execution.

    The host weighs: it has the key shadow. What goes to the GPU of a coded token is its code row,
    half a byte per channel, and 4 bytes of L' for each query head. `states` takes keys and values
    out of rows.
    """

    def __init__(
        self, lane: CopyLane, ring: StagingRing, states: StagedStates, row_bytes: int
    ) -> None:
        self._lane = lane
        self._ring = ring
        self._states = states
        self._row_bytes = row_bytes
        self._attention: TorchCodedAttention | None = None

    def attend(
        self,
        scaled: torch.Tensor,
        like: torch.Tensor,
        rows: tuple[NDArray[np.int64], NDArray[np.uint64]],
        exact: list[NDArray[np.int64]],
        coded: list[CodedSet],
        own: list[SegmentValues],
        spec: KernelSpec,
    ) -> torch.Tensor:
        """Attend to the sets of a layer, one for all heads or one per KV head.

        `scaled` is q', float32 of shape (query_heads, head_dim), on the host, and `like` any tensor
        beside the model. `rows` are positions of the exact tokens of all sets, ascending, and
        addresses of their rows; `exact` and `coded` are the tokens of each set, `own` the values of
        each segment. Returns float32 of shape (query_heads, head_dim), beside the model.
        """
        if self._attention is None:
            self._attention = TorchCodedAttention(like.device)
        query = scaled.to(like.device)
        union, addresses = rows
        held = self._brought(addresses, self._row_bytes)
        keys, values = (one.transpose(0, 1) for one in self._states.split(held, query))
        if len(exact) == 1:
            tokens = self._coded(coded[0], own, spec, like.device)
            return self._attention.attend(query, keys, values, tokens)
        group, out = len(query) // len(exact), []
        for head, (some, of) in enumerate(zip(exact, coded, strict=True)):
            inside = torch.from_numpy(np.searchsorted(union, some)).to(like.device)
            only, heads = slice(head, head + 1), slice(head * group, (head + 1) * group)
            tokens = [_of_head(one, only, heads) for one in self._coded(of, own, spec, like.device)]
            states = keys[inside][:, only], values[inside][:, only]
            out.append(self._attention.attend(query[heads], *states, tokens))
        return torch.cat(out)

    # --- inside ----------------------------------------------------------------------------

    def _brought(self, addresses: NDArray[np.uint64], row_bytes: int) -> torch.Tensor:
        """Return rows, uint8 (rows, row_bytes), beside the model."""
        incoming = IncomingRows(self._lane, self._ring, len(addresses), row_bytes)
        incoming.add_from(addresses)
        return self._states.taken(incoming)

    def _weights(self, weighed: Weighed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return L', int32 (query_heads, tokens), and invalid keys, bool (tokens, kv_heads)."""
        heads, count = weighed.aligned.shape
        size = _ALIGNED_BYTES * heads
        incoming = IncomingRows(self._lane, self._ring, count, size + len(weighed.invalid))
        for first in range(0, count, incoming.piece_rows):
            part = slice(first, min(first + incoming.piece_rows, count))

            def write(out: NDArray[np.uint8], part: slice = part) -> int:
                out[:, :size] = np.ascontiguousarray(weighed.aligned[:, part].T).view(np.uint8)
                out[:, size:] = weighed.invalid[:, part].T
                return len(out)

            incoming.fill(part.stop - part.start, write)
        both = self._states.taken(incoming)
        return both[:, :size].contiguous().view(torch.int32).T, both[:, size:] != 0

    def _coded(
        self,
        coded: CodedSet,
        own: list[SegmentValues],
        spec: KernelSpec,
        device: torch.device,
    ) -> list[TorchCodedTokens]:
        """Return the coded tokens of a set, segment by segment."""
        if not len(coded.positions):
            return []
        rows = self._brought(coded.code_rows, code_row_bytes(spec) + spec.kv_heads)
        codes, exponents = unpack_code_rows(rows, spec)
        aligned, invalid = self._weights(coded.weighed)
        edges = np.searchsorted(coded.positions, np.arange(len(own) + 1) * spec.segment_tokens)
        (numbers,) = np.nonzero(np.diff(edges))
        # At once for all segments: a copy takes as long however little it is.
        taken = [own[number].statistics for number in numbers.tolist()]
        c = torch.from_numpy(np.stack([one.exponents for one in taken])).to(device)
        means = torch.from_numpy(np.stack([one.means for one in taken])).to(device)
        parts = [slice(*edges[number : number + 2].tolist()) for number in numbers.tolist()]
        return [
            TorchCodedTokens(
                aligned[:, part], invalid[part], codes[part], exponents[part], c[at], means[at]
            )
            for at, part in enumerate(parts)
        ]


def _of_head(tokens: TorchCodedTokens, head: slice, heads: slice) -> TorchCodedTokens:
    """Return what one KV head and its query heads have of coded tokens."""
    return TorchCodedTokens(
        tokens.aligned[heads],
        tokens.invalid_keys[:, head],
        tokens.codes[:, head],
        tokens.exponents[:, head],
        tokens.channel_exponents[head],
        tokens.means[head],
    )


# --- Attention over gathered rows ---

# Bounds what widening takes of the GPU. Never derived from budget or placement: it changes bits.
TILE_ROWS = 4096


@dataclass(frozen=True, eq=False)
class GatheredAttention:
    """Attends to all selected rows at once, where the model computes (HillInfer, section 4.3).

    A few large kernels instead of many small ones: the rows of a selection lie in one array, in
    ascending position, whatever came ahead of time and whatever did not. `gather` brings rows
    together or tells where they lie, and `states` takes keys and values out of them.
    """

    lane: CopyLane
    ring: StagingRing
    gather: Gather
    states: StagedStates
    recorder: Recorder = SILENT

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

        Of the parameters `copied` is what of the rows was sent ahead, or None, and `newest` the
        newest token's row, uint8 (1, row_bytes) beside the model, where the host does not have it
        yet; then `copied` is there, too. The others are as in `RowAttention.selected`. Returns
        (query_heads, 1, head_dim) in the query's type.
        """
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        row_bytes = sequence.tails.shape[2]
        if copied is None:
            incoming = IncomingRows(self.lane, self.ring, len(union), row_bytes)
            with closing(self.gather.copied(layer, sequence, union, step, landed)) as blocks:
                for _, block in blocks:
                    incoming.add(block)
            rows = self.states.taken(incoming)
        else:
            ahead = copied.result()
            rows = self._completed(layer, sequence, union, step, landed, ahead, newest)
        with self.recorder.span(Lane.COMPUTE, "attention", layer=layer):
            wide = query.to(compute_type(query))
            merges = [SoftmaxMerge(heads, scaling) for heads in wide.chunk(len(sets))]
            for head, (merge, positions) in enumerate(zip(merges, sets, strict=True)):
                inside = None if len(sets) == 1 else np.searchsorted(union, positions)
                for start in range(0, len(positions), TILE_ROWS):
                    tile = slice(start, start + TILE_ROWS)
                    own = rows[tile] if inside is None else rows[_on(rows, inside[tile])]
                    keys, values = self.states.split(own, wide)
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
        incoming = IncomingRows(self.lane, self.ring, int(late.sum()), row_bytes)
        fetched = self.gather.in_place(layer, sequence, union, step, landed)
        with closing(fetched) as runs:
            start = 0
            for addresses in runs:
                wanted = addresses[late[start : start + len(addresses)]]
                start += len(addresses)
                incoming.add_from(wanted)
        parts = [self.states.taken(ahead.rows), self.states.taken(incoming)]
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
    divided. `rings` are its buffers: for rows, for those of new tokens that come back, and for
    queries; `attention`, `coded`, `states`, `ahead`, `arrivals` and `queries` the parts, each for
    one way that bytes take.
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
