# SPDX-License-Identifier: Apache-2.0
"""Importance evaluation whose work is done and whose result is replaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import Scorer, SegmentShadow
from hillinfer.hie.evaluation import ImportanceEvaluation
from hillinfer.settings import Settings
from hillinfer.storage.sequence import Sequence as StoredSequence
from hillinfer_bench.decode.selections import Selections


class ReplayedEvaluation(ImportanceEvaluation):
    """Scores and ranks as ever, then selects what was recorded.

    Which layer and sequence is asked for is told by the statistics of the first segment, of which
    every layer of every sequence has its own.

    Parameters
    ----------
    scorer, settings
        As for `ImportanceEvaluation`.
    selections
        What is selected.
    sequences
        Those there are, in the order in which they replay.
    """

    def __init__(
        self,
        scorer: Scorer,
        settings: Settings,
        selections: Selections,
        sequences: list[StoredSequence],
    ) -> None:
        super().__init__(scorer, settings)
        self._selections = selections
        self._sequences = sequences

    @property
    def native(self) -> None:
        """None: what is scored here is not what is selected."""
        return

    def select(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> list[NDArray[np.int64]]:
        """Score all tokens, then return the recorded set; see `ImportanceEvaluation`."""
        own = super().select(query, scaling, segments)
        return self._replayed(segments, 0, len(own))

    def select_next(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> list[NDArray[np.int64]]:
        """Score all tokens there are, then return the recorded set; see `ImportanceEvaluation`."""
        own = super().select_next(query, scaling, segments)
        return self._replayed(segments, 1, len(own))

    def _replayed(
        self, segments: Sequence[SegmentShadow], coming: int, sets: int
    ) -> list[NDArray[np.int64]]:
        layer, row = self._place(segments[0].statistics)
        length = segments[-1].base_position + segments[-1].tokens + coming
        return [self._selections.positions(layer, row, length)] * sets

    def _place(self, statistics: object) -> tuple[int, int]:
        for row, sequence in enumerate(self._sequences):
            for layer, own in enumerate(sequence.segments[0].layers):
                if own.statistics is statistics:
                    return layer, row
        raise AssertionError("segments are scored of a sequence that was not opened here")
