# SPDX-License-Identifier: Apache-2.0
"""Attention over rows wherever they lie, one block after the other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.native_attention import NativeAttention
from hillinfer.attention.softmax_merge import SoftmaxMerge
from hillinfer.counters import Counters
from hillinfer.storage.landed_rows import LandedRows
from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.row_reader import RowReader
from hillinfer.storage.sequence import Sequence
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT


class RowAttention:
    """Attends to all rows of a sequence, or to selected ones, in ascending position.

    Parameters
    ----------
    reader, layout
        Bring rows together and say what is in them.
    block_rows
        Queries and rows that are attended to at a time.
    counters
        Where copies to the model's device are counted.
    native
        Attends to one selected set where its rows lie, on the CPU; torch does where None.
    recorder
        Notes how long attention itself takes, once rows are there.
    """

    def __init__(
        self,
        reader: RowReader,
        layout: RowLayout,
        block_rows: int,
        counters: Counters,
        native: NativeAttention | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self._native = native
        self._recorder = recorder
        self._reader = reader
        self._layout = layout
        self._block_rows = block_rows
        self._counters = counters

    def dense(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend to past rows block by block, then to the new tokens causally.

        Parameters
        ----------
        layer, sequence
            Where the new tokens were just appended.
        query
            (query_heads, tokens, head_dim) on the model's device.
        keys, values
            The new tokens', stored type, (kv_heads, tokens, head_dim), on the model's device.
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, tokens, head_dim) in the query's type.
        """
        tokens = query.shape[1]
        block = self._block_rows
        wide = query.to(_compute_type(query))
        starts = range(0, tokens, block)
        merges = [SoftmaxMerge(wide[:, start : start + block], scaling) for start in starts]
        past = np.arange(sequence.lengths[layer] - tokens)
        for rows in self._reader.stream(layer, sequence, past):
            with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                block_keys, block_values = self._states(rows, wide)
                for merge in merges:
                    merge.add_block(block_keys, block_values)
        with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
            for i, start in enumerate(starts):
                block_keys = keys[:, start : start + block].to(wide.dtype)
                block_values = values[:, start : start + block].to(wide.dtype)
                merges[i].add_causal(block_keys, block_values)
                for merge in merges[i + 1 :]:
                    merge.add_block(block_keys, block_values)
            return torch.cat([merge.result() for merge in merges], dim=1).to(query.dtype)

    def selected(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: list[NDArray[np.int64]],
        scaling: float,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor:
        """Attend to selected rows and let those that were cold become hot.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        query
            (query_heads, 1, head_dim) on the model's device.
        sets
            Ascending int64 positions: one set for the layer, or one per KV head.
        scaling
            Factor on inner products.
        step
            The current step.
        landed
            What of their cold rows was read ahead, or None.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        attended = sum(len(positions) for positions in sets)
        if (
            self._native is not None
            and query.device.type == "cpu"
            and len(sets) == 1
            # Where nothing was selected, output is that of an ordinary cache to the last bit.
            and attended < sequence.lengths[layer]
        ):
            softmax = self._native.begin(query[:, 0], scaling)
            tile = softmax.tile_rows
            fetched = self._reader.fetch_in_place(layer, sequence, sets[0], step, landed, tile)
            for addresses in fetched:
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    softmax.add([addresses])
            return softmax.result()[:, None].to(query.dtype)
        wide = query.to(_compute_type(query))
        merges = [SoftmaxMerge(heads, scaling) for heads in wide.chunk(len(sets))]
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        for block, rows in self._reader.fetch(layer, sequence, union, step, landed):
            with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                block_keys, block_values = self._states(rows, wide)
                if len(sets) == 1:
                    merges[0].add_block(block_keys, block_values)
                    continue
                for head, positions in enumerate(sets):
                    inside = np.flatnonzero(np.isin(block, positions, assume_unique=True))
                    if len(inside):
                        index = torch.from_numpy(inside).to(query.device)
                        own = slice(head, head + 1)
                        merges[head].add_block(block_keys[own, index], block_values[own, index])
        return torch.cat([merge.result() for merge in merges]).to(query.dtype)

    def _states(
        self, rows: NDArray[np.uint8], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows, (kv_heads, rows, head_dim), on a tensor's device."""
        tensor = torch.from_numpy(rows).to(like.device)
        if like.device.type != "cpu":
            self._counters.host_to_device_bytes += tensor.numel()
        return (
            self._layout.keys(tensor).transpose(0, 1).to(like.dtype),
            self._layout.values(tensor).transpose(0, 1).to(like.dtype),
        )


def _compute_type(query: torch.Tensor) -> torch.dtype:
    """Attention computes in the model's type, but FP16 kernels are slow and coarse on a CPU."""
    if query.dtype == torch.float16 and query.device.type == "cpu":
        return torch.float32
    return query.dtype
