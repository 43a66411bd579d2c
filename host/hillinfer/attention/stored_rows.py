# SPDX-License-Identifier: Apache-2.0
"""Attention over stored rows: of a prompt's chunk to all, of one token to selected ones."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.softmax_merge import RowStates, SoftmaxMerge, compute_type
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.trace.recorder import SILENT, Lane, Recorder

# --- A prompt's chunk ---


class DenseAttention:
    """Attends to all rows of a sequence, a block of rows after the other, in ascending position.

    All queries of a chunk attend to a block at once, so that a block is brought and widened once.

    Parameters
    ----------
    gather
        Brings rows together.
    states
        Takes keys and values out of them.
    block_rows
        Past rows that it brings at a time.
    recorder
        Notes how long attention itself takes, once rows are there.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        block_rows: int,
        recorder: Recorder = SILENT,
    ) -> None:
        self._recorder = recorder
        self._gather = gather
        self._states = states
        # Widened in what gathering takes on its way, which is free by then: two blocks at once,
        # because torch's causal kernel is a fifth slower on fewer than 768 queries.
        self._own_tokens = 2 * block_rows

    def attend(
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
        # Models give a view across tokens, and every block would pack its heads anew.
        wide = query.to(compute_type(query)).contiguous()
        merge = SoftmaxMerge(wide, scaling)
        past = np.arange(sequence.lengths[layer] - tokens)
        for rows in self._gather.stream(layer, sequence, past):
            with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                merge.add_block(*self._states(rows, wide))
        with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
            for start in range(0, tokens, self._own_tokens):
                end = min(start + self._own_tokens, tokens)
                block_keys = keys[:, start:end].to(wide.dtype)
                block_values = values[:, start:end].to(wide.dtype)
                merge.add_causal(block_keys, block_values, start)
                if end < tokens:
                    merge.add_block(block_keys, block_values, end)
            return merge.result().to(query.dtype)


# --- One token ---


class RowAttention:
    """Attends to selected rows of a sequence, in ascending position.

    For what the native library does not do: one set per KV head, and everything selected, where
    output is that of an ordinary cache to the last bit.

    Parameters
    ----------
    gather
        Brings rows together, or tells where they lie.
    states
        Takes keys and values out of them.
    recorder
        Notes how long attention itself takes, once rows are there.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        recorder: Recorder = SILENT,
    ) -> None:
        self._recorder = recorder
        self._gather = gather
        self._states = states

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
        wide = query.to(compute_type(query))
        merges = [SoftmaxMerge(heads, scaling) for heads in wide.chunk(len(sets))]
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        with closing(self._gather.copied(layer, sequence, union, step, landed)) as blocks:
            for block, rows in blocks:
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    keys, values = self._states(rows, wide)
                    if len(sets) == 1:
                        merges[0].add_block(keys, values)
                        continue
                    for head, positions in enumerate(sets):
                        inside = np.flatnonzero(np.isin(block, positions, assume_unique=True))
                        if len(inside):
                            index = torch.from_numpy(inside).to(query.device)
                            own = slice(head, head + 1)
                            merges[head].add_block(keys[own, index], values[own, index])
        return torch.cat([merge.result() for merge in merges]).to(query.dtype)
