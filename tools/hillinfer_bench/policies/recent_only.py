# SPDX-License-Identifier: Apache-2.0
"""Sinks and the most recent tokens, whatever the query."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_bench.policies.selection_policy import SelectionPolicy


class RecentOnly(SelectionPolicy):
    """A sliding window with attention sinks (the StreamingLLM baseline): what scores must beat."""

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Take the newest tokens; see `SelectionPolicy`."""
        return [self.best(torch.arange(length).double()[None]) for length in layer.lengths]
