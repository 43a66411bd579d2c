# SPDX-License-Identifier: Apache-2.0
"""Selected sets, recorded from a model with the product's own selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.opening import make_scorer
from hillinfer.engine.budget_plan import kernel_spec
from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer_bench.quality.forced_reading import Prefix, forced_logits
from hillinfer_bench.quality.policies import ContractSelection, LayerQueries, SelectionPolicy
from hillinfer_bench.replay.selection_trace import SelectionTrace, Sets
from hillinfer_model.choices import Scope


class _Recorded(SelectionPolicy):
    """Selects as another policy does and remembers it, layer by layer."""

    def __init__(self, inner: SelectionPolicy, advance: Callable[[], None]) -> None:
        super().__init__(inner.settings)
        self.layers: list[Sets] = []
        self._inner = inner
        self._advance = advance

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Select and remember; see `SelectionPolicy`."""
        selected = self._inner.select(layer)
        self.layers.append(tuple(sets[0].astype(np.int32) for sets in selected))
        self._advance()
        return selected


class _Overheard(_Recorded):
    """Remembers what another policy would select while every query attends to everything."""

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Remember a selection and select everything; see `SelectionPolicy`."""
        super().select(layer)
        return [np.arange(length)[None] for length in layer.lengths]


def record_selections(
    model: Any,
    prefix: Prefix,
    token_ids: Sequence[int],
    settings: Settings,
    text: str,
    observed_queries: int,
    advance: Callable[[], None] = lambda: None,
) -> SelectionTrace:
    """Return what every layer selects while the last tokens of a text are read one by one.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode, inside `selecting`.
    prefix
        All but the last tokens, read densely.
    token_ids
        The whole text; what follows the prefix is read sparsely, each token attending to its own
        selected set.
    settings
        How tokens are selected; the scope must be a layer.
    text
        Its name.
    observed_queries
        How many of the prefix' last queries are asked for what they would select, each from the
        tokens up to its own.
    advance
        Called after each layer.

    Raises
    ------
    SettingsError
        Where the scope is not a layer: several sets would share one row.
    """
    if settings.scope is not Scope.LAYER:
        raise SettingsError(f"scope={settings.scope.value}: recorded sets are those of a layer")
    scorer = make_scorer(settings.device, kernel_spec(prefix.shape, settings), settings.scope)
    selection = ContractSelection(scorer, settings)
    seen = max(0, prefix.tokens - observed_queries)
    overheard = _Overheard(selection, lambda: None)
    if seen < prefix.tokens:
        before = replace(
            prefix,
            keys=tuple(keys[:, :, :seen] for keys in prefix.keys),
            values=tuple(values[:, :, :seen] for values in prefix.values),
        )
        forced_logits(model, before, token_ids[seen : prefix.tokens], overheard)
    recorded = _Recorded(selection, advance)
    forced_logits(model, prefix, token_ids[prefix.tokens :], recorded)
    return SelectionTrace(
        text,
        settings,
        prefix.tokens,
        tuple(recorded.layers),
        tuple(overheard.layers) or ((),) * len(recorded.layers),
    )
