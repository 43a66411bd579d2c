# SPDX-License-Identifier: Apache-2.0
"""The ideal that scores are measured against: true attention weights."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_bench.policies.selection_policy import SelectionPolicy
from hillinfer_model.choices import Scope


class FloatWeights(SelectionPolicy):
    """Ranks tokens by the sum of their softmax weights over the query heads of a scope.

    Reads every key exactly, in floating point, so it is no way to serve: it shows what the best
    ranking of this kind gives, apart from number formats.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank by float32 softmax weights; see `SelectionPolicy`."""
        weights = torch.softmax(layer.inner_products(), dim=-1).sum(1)
        if self.settings.scope is Scope.LAYER:
            weights = weights.sum(0, keepdim=True)
        return [self.best(weights[:, i, :length]) for i, length in enumerate(layer.lengths)]
