# SPDX-License-Identifier: Apache-2.0
"""A step over exact rows and coded tokens whose attention is computed where the model is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.engine.coded_step import CodedStep, DescribedCodes, Positions
from hillinfer.engine.selection import Sets
from hillinfer.gpu.attention import GpuSide
from hillinfer.gpu.coded import CodedSet
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence


class GpuCodedStep(CodedStep):
    """Brings what a step attends to to a GPU; codes, rows and L' are found as on the processor.

    Parameters
    ----------
    given
        As for `CodedStep`.
    gpu
        Copies, and attends.
    """

    def __init__(self, *given: Any, gpu: GpuSide) -> None:
        super().__init__(*given)
        self._gpu = gpu

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: Sets,
        scaling: float,
        step: int,
        landed: LandedRows | None,
        exact: Sets,
        arriving: LandedRows | None = None,
    ) -> torch.Tensor:
        """Attend to what is selected; see `CodedStep`. The output is beside the model."""
        # The newest row is attended to, and its group may be coded from.
        self._gpu.arrivals.settle()
        given = layer, sequence, query, sets, scaling, step, landed, exact, arriving
        return super().attend(*given)

    def _attend_natively(self, *given: Any) -> torch.Tensor | None:
        """Leave it to the parts: the library attends on the processor."""
        return None

    def _attended(
        self,
        scaled: torch.Tensor,
        query: torch.Tensor,
        union: Positions,
        addresses: NDArray[np.uint64],
        exact: Sets,
        described: list[DescribedCodes],
    ) -> torch.Tensor:
        coded = [CodedSet(one.positions, one.code_rows, one.weighed) for one in described]
        own, spec = described[0].own, self._weights.spec
        out = self._gpu.coded.attend(scaled, query, (union, addresses), exact, coded, own, spec)
        return out.view(query.shape).to(query)
