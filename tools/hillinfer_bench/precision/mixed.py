# SPDX-License-Identifier: Apache-2.0
"""Attention to the best tokens in 16 bits and to other selected ones as codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.scoring.scorer import Scorer, SegmentShadow
from hillinfer.settings import Settings
from hillinfer_bench.precision.key_readings import KeyReading
from hillinfer_bench.precision.value_forms import Split, ValueForm
from hillinfer_bench.quality.policies import (
    Attending,
    ContractSelection,
    LayerQueries,
    up_to,
)
from hillinfer_model.choices import Scope
from hillinfer_model.selection import select_positions


class MixedPrecision(Attending):
    """Ranks as the contract does; the best are attended to as rows, the others as codes.

    Parameters
    ----------
    scorer
        Ranks for the layer, which says what is selected.
    ranker
        Says which of the selected tokens are exact: `scorer`, or one of scope `kv_head`.
    settings
        α and kept tokens.
    split
        How many are exact.
    form
        How values are coded.
    keys
        How coded tokens' keys are read.
    """

    def __init__(
        self,
        scorer: Scorer,
        ranker: Scorer,
        settings: Settings,
        split: Split,
        form: ValueForm,
        keys: KeyReading,
    ) -> None:
        self._selection = ContractSelection(scorer, settings)
        self._scorer, self._ranker = scorer, ranker
        self._split = split
        self._form = form
        self._keys = keys

    def attend(self, layer: LayerQueries, values: torch.Tensor) -> torch.Tensor:
        """Attend with one softmax over both kinds; see `Attending`."""
        segments = self._selection.segments(layer)
        exact, coded = self._masks(layer, segments)
        coded_values = self._decoded_values(layer, values, segments)
        rows = layer.inner_products()
        others = self._keys.products(layer, segments, self._scorer.spec)
        products = torch.where(exact, rows, others.masked_fill(~coded, -torch.inf))
        weights = torch.softmax(products, dim=-1)
        out = _weighted(weights * exact, values.float()) + _weighted(weights * coded, coded_values)
        return out.flatten(0, 1)

    def _masks(
        self, layer: LayerQueries, segments: Sequence[SegmentShadow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are exact and which coded, bool (1 or kv_heads, 1, queries, N)."""
        kv_heads = layer.keys.shape[1]
        sets = 1 if self._ranker.scope is Scope.LAYER else kv_heads
        exact = np.zeros((sets, 1, len(layer.queries), len(layer.keys)), np.bool_)
        coded = np.zeros_like(exact)
        for i, (query, length) in enumerate(zip(layer.queries, layer.lengths, strict=True)):
            own = up_to(segments, length)
            count, kept = self._selection.count(length), self._selection.kept(length)
            exact_count = self._split.exact_count(length, count, len(kept))
            codes = _score_codes(self._scorer, query, layer.scaling, own)
            selected = select_positions(codes[0], count, kept)
            if self._ranker is not self._scorer:
                codes = _score_codes(self._ranker, query, layer.scaling, own)
            for g in range(sets):
                coded[g, 0, i, selected] = True
                if exact_count:
                    ranked = np.zeros(length, np.uint16)
                    ranked[selected] = codes[g, selected]
                    best = select_positions(ranked, exact_count, kept)
                    exact[g, 0, i, best] = True
        return torch.from_numpy(exact), torch.from_numpy(coded & ~exact)

    def _decoded_values(
        self, layer: LayerQueries, values: torch.Tensor, segments: Sequence[SegmentShadow]
    ) -> torch.Tensor:
        """Return what the values' codes stand for, float32 (N, kv_heads, head_dim)."""
        parts: list[torch.Tensor] = []
        statistics = None
        for segment in segments:
            own = values[segment.base_position : segment.base_position + segment.tokens]
            # As for keys: taken once, of what there is when the first query is scored.
            seen = max(layer.first_length - segment.base_position, 1)
            statistics = self._scorer.statistics(
                own[:seen].half().contiguous(), segment.base_position, statistics
            )
            parts.append(self._form.decoded(own.float(), statistics))
        return torch.cat(parts)


def _score_codes(
    scorer: Scorer, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
) -> NDArray[np.uint16]:
    """Return every token's score code, uint16 (1 or kv_heads, N)."""
    return (scorer.tuples(query, scaling, segments) >> np.uint32(16)).astype(np.uint16)


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return weighted sums, (kv_heads, group, queries, head_dim)."""
    return weights @ values.transpose(0, 1)[:, None]
