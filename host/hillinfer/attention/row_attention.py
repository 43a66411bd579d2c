# SPDX-License-Identifier: Apache-2.0
"""Attention over rows wherever they lie, one block after the other."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.native_attention import NativeAttention
from hillinfer.attention.row_states import RowStates, compute_type
from hillinfer.attention.softmax_merge import SoftmaxMerge
from hillinfer.native.structures import Places
from hillinfer.storage.gather import Gather
from hillinfer.storage.prefetch_buffer import LandedRows
from hillinfer.storage.sequence import Sequence
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT


class RowAttention:
    """Attends to selected rows of a sequence, in ascending position.

    Parameters
    ----------
    gather
        Brings rows together, or tells where they lie.
    states
        Takes keys and values out of them.
    native
        Attends to one selected set where its rows lie, on the CPU; torch does where None.
    recorder
        Notes how long attention itself takes, once rows are there.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        native: NativeAttention | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self._native = native
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
        attended = sum(len(positions) for positions in sets)
        if (
            self._native is not None
            and query.device.type == "cpu"
            and len(sets) == 1
            # Where nothing was selected, output is that of an ordinary cache to the last bit.
            and attended < sequence.lengths[layer]
        ):
            out = self._in_place(layer, sequence, query[:, 0], sets[0], scaling, step, landed)
            return out[:, None].to(query.dtype)
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

    def _in_place(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        positions: NDArray[np.int64],
        scaling: float,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor:
        """Attend to one set where its rows lie; return float32 (query_heads, head_dim)."""
        native, recorder = self._native, self._recorder
        assert native is not None

        def attend(places: Places) -> tuple[torch.Tensor | None, NDArray[np.uint64]]:
            started = time.perf_counter_ns()
            attended = native.attend_hot(query, scaling, places)
            if attended[0] is not None:
                stop = time.perf_counter_ns()
                recorder.note(Lane.COMPUTE, "attention", started, stop, layer=layer)
            return attended

        out = addresses = None
        with ExitStack() as stack:
            # Held until all rows were attended to, or were taken over with what was found: none may
            # move in between.
            with self._gather.attending:
                # Where something was read ahead, something is cold.
                if landed is None and len(positions):
                    out, addresses = self._gather.attend_hot(
                        layer, sequence, positions, step, attend
                    )
                if out is None:
                    softmax = native.begin(query, scaling)
                    fetched = self._gather.in_place(
                        layer, sequence, positions, step, landed, softmax.tile_rows, addresses
                    )
                    # Closed here and now: what it holds must not wait for a traceback to go.
                    stack.callback(fetched.close)
                    first = next(fetched, None)
            if out is not None:
                self._gather.note_hot(layer, sequence, step, len(positions))
                return out
            for run in chain(() if first is None else (first,), fetched):
                with recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    softmax.add([run])
            return softmax.result()
