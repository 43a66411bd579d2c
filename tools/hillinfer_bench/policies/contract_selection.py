# SPDX-License-Identifier: Apache-2.0
"""The product's own selection: key shadow, score codes, top α."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import Scorer, SegmentShadow, total_tokens
from hillinfer.hie.wanted import Wanted
from hillinfer.settings import Settings
from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_bench.policies.selection_policy import SelectionPolicy
from hillinfer_model.kernel_spec import BEAT_BYTES


class ContractSelection(SelectionPolicy):
    """Selects as a `HillInferCache` does, for a rule, a shadow and a scope (scoring contract).

    Codes of a token are the same whenever they are made, so all tokens are coded once and each
    query is shown the codes up to its own token.

    Parameters
    ----------
    scorer
        Executes the scoring contract.
    settings
        α, kept tokens and the upper bound.
    """

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        super().__init__(settings)
        self._scorer = scorer

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Score and choose for each query in turn; see `SelectionPolicy`."""
        segments = self._segments(layer)
        return [
            self.chosen(query, layer.scaling, _up_to(segments, length))
            for query, length in zip(layer.queries, layer.lengths, strict=True)
        ]

    def chosen(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> NDArray[np.int64]:
        """Return what one query selects of the tokens of some segments, int64 (sets, k)."""
        wanted = self._wanted(total_tokens(segments))
        return np.stack(self._scorer.choose(query, scaling, segments, 0, wanted))

    def _wanted(self, length: int) -> Wanted:
        settings = self.settings
        return Wanted(self.count(length), settings.kept_sinks, settings.kept_recent)

    def _segments(self, layer: LayerQueries) -> list[SegmentShadow]:
        """Code all tokens, each segment's statistics taken as in decode (contract, section 3)."""
        spec = self._scorer.spec
        keys = layer.keys.half()
        # Nothing is scored while every token is selected.
        scored = (length for length in layer.lengths if self.count(length) < length)
        first_scored = next(scored, layer.first_length)
        segments: list[SegmentShadow] = []
        for base in range(0, len(keys), spec.segment_tokens):
            own = keys[base : base + spec.segment_tokens]
            # Statistics are taken once: of a full segment, of what the segment held when the
            # first query was scored, or of the one token that opened it later.
            seen = max(first_scored - base, 1)
            statistics = self._scorer.statistics(
                own[:seen], base, segments[-1].statistics if segments else None
            )
            shadow = np.zeros((spec.segment_beats, BEAT_BYTES), np.uint8)
            self._scorer.encode(own, statistics, shadow, 0)
            segments.append(SegmentShadow(base, len(own), shadow, statistics))
        return segments


def _up_to(segments: Sequence[SegmentShadow], length: int) -> list[SegmentShadow]:
    """Return the segments of the first `length` tokens, the last cut short."""
    return [
        SegmentShadow(
            segment.base_position,
            min(segment.tokens, length - segment.base_position),
            segment.shadow,
            segment.statistics,
        )
        for segment in segments
        if segment.base_position < length
    ]
