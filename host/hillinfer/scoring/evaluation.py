# SPDX-License-Identifier: Apache-2.0
"""Importance evaluation: which tokens one decode step attends to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import Variant
from hillinfer.scoring.scorer import Scorer, SegmentShadow, Wanted, total_tokens
from hillinfer.settings import Settings
from hillinfer_model.choices import Scope
from hillinfer_model.selection import selected_count


class ImportanceEvaluation:
    """Scores all tokens of a sequence where they lie and selects the top α (HIE).

    Parameters
    ----------
    scorer
        Executes the scoring contract.
    settings
        α, kept tokens and the upper bound.
    """

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._sets = 1 if scorer.scope is Scope.LAYER else scorer.spec.kv_heads
        # Of the length that was asked for last: all layers of a step have the same.
        self._last = 0, self._wanted_of(0)

    @property
    def is_fast(self) -> bool:
        """Whether the processor scores by itself, in C++ and with vectors."""
        return self._scorer.is_fast

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses as this does; None where nothing does."""
        return self._scorer.table_variant

    def selects_all(self, length: int) -> bool:
        """Say whether a sequence of this length is selected whole, so that nothing is scored."""
        return self.wanted(length).count == length

    def everything(self, length: int) -> list[NDArray[np.int64]]:
        """Return the sets of a sequence that is selected whole."""
        return [np.arange(length)] * self._sets

    def select(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> list[NDArray[np.int64]]:
        """Select tokens for one query of one layer.

        Parameters
        ----------
        query
            float32 (query_heads, head_dim) on the CPU.
        scaling
            Factor on inner products.
        segments
            All segments of the sequence in this layer.

        Returns
        -------
        One ascending int64 array of positions per selected set: one for the layer, or one per KV
        head.
        """
        length = total_tokens(segments)
        if self.selects_all(length):
            return self.everything(length)
        return self._scorer.choose(query, scaling, segments, 0, self.wanted(length))

    def select_next(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> list[NDArray[np.int64]]:
        """Select for the token after those of `segments`, which has a query and no key yet.

        It is as recent as a token can be, so it is kept; the others are chosen from what there is
        (HillInfer section 4.3).

        Parameters
        ----------
        query, scaling, segments
            As in `select`; the query is a predicted one.

        Returns
        -------
        As `select` of one token more: as many positions, the last of them the new token's.
        """
        past = total_tokens(segments)
        if self.selects_all(past + 1):
            return self.everything(past + 1)
        return self._scorer.choose(query, scaling, segments, 1, self.wanted(past + 1))

    def wanted(self, length: int) -> Wanted:
        """Return how much is selected of so many tokens."""
        # One pair, because several threads ask.
        known, wanted = self._last
        if known != length:
            wanted = self._wanted_of(length)
            self._last = length, wanted
        return wanted

    def _wanted_of(self, length: int) -> Wanted:
        settings = self._settings
        count = selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)
        return Wanted(count, settings.kept_sinks, settings.kept_recent)
