# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of a prompt to everything up to it."""

from __future__ import annotations

import numpy as np
import torch

from hillinfer.attention.row_states import RowStates, compute_type
from hillinfer.attention.softmax_merge import SoftmaxMerge
from hillinfer.storage.gather import Gather
from hillinfer.storage.sequence import Sequence
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT


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
