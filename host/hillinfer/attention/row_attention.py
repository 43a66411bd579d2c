# SPDX-License-Identifier: Apache-2.0
"""Attention in torch over copies of rows, one block after the other."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.row_states import RowStates, compute_type
from hillinfer.attention.softmax_merge import SoftmaxMerge
from hillinfer.storage.gather import Gather
from hillinfer.storage.prefetch_buffer import LandedRows
from hillinfer.storage.sequence import Sequence
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT


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
