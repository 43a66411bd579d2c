# SPDX-License-Identifier: Apache-2.0
"""Selected sets with their exact tokens, recorded from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.scoring.scorer import Scorer, SegmentShadow, total_tokens
from hillinfer.settings import Settings
from hillinfer_bench.quality.forced_reading import Prefix, forced_logits
from hillinfer_bench.quality.policies import ContractSelection, LayerQueries
from hillinfer_bench.replay.code_split import CodedTrace
from hillinfer_bench.replay.selection_trace import SelectionTrace, Sets
from hillinfer_model.choices import Scope
from hillinfer_model.selection import exact_count


class _Split(ContractSelection):
    """Selects as the product does and remembers sets and their exact tokens."""

    def __init__(self, scorer: Scorer, settings: Settings) -> None:
        super().__init__(scorer, settings)
        self.layers: list[Sets] = []
        self.exact: list[Sets] = []
        self._own: list[NDArray[np.int32]] = []

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Select and remember; see `SelectionPolicy`."""
        self._own = []
        selected = super().select(layer)
        self.layers.append(tuple(sets[0].astype(np.int32) for sets in selected))
        self.exact.append(tuple(self._own))
        return selected

    def chosen(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> NDArray[np.int64]:
        """Rank once for both sizes; see `ContractSelection`."""
        length, settings = total_tokens(segments), self.settings
        wanted = self._wanted(length)
        kept = min(settings.kept_tokens, length)
        count = exact_count(length, settings.exact_share, settings.exact_floor, kept, wanted.count)
        both = (wanted, replace(wanted, count=count))
        sets, exact = self._scorer.choose(query, scaling, segments, 0, both)
        self._own.append(exact[0].astype(np.int32))
        return np.stack(sets)


def record_coded(
    model: Any, prefix: Prefix, token_ids: Sequence[int], settings: Settings, text: str
) -> CodedTrace:
    """Return what every layer selects, and which of it is exact, token by token.

    Attention reads all selected tokens in 16 bits while they are recorded.

    Parameters
    ----------
    model, prefix, token_ids, text
        As for `record_selections`.
    settings
        How tokens are selected, with `exact` below 1; the scope must be a layer.

    Raises
    ------
    SettingsError
        Where the scope is not a layer.
    """
    if settings.scope is not Scope.LAYER:
        raise SettingsError(f"scope={settings.scope.value}: recorded sets are those of a layer")
    scorer = make_scorer(settings.device, kernel_spec(prefix.shape, settings), settings.scope)
    recorded = _Split(scorer, settings)
    forced_logits(model, prefix, token_ids[prefix.tokens :], recorded)
    none: tuple[Sets, ...] = ((),) * len(recorded.layers)
    trace = SelectionTrace(text, settings, prefix.tokens, tuple(recorded.layers), none)
    return CodedTrace(trace, tuple(recorded.exact))
