# SPDX-License-Identifier: Apache-2.0
"""The table of latency models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hillinfer.app.latency_model import LatencyModel
from hillinfer.app.model_name import ModelName
from hillinfer.app.parallel_scorers import ParallelScorers
from hillinfer.app.rates import Rates
from hillinfer.app.scores_then_rows import ScoresThenRows
from hillinfer.app.two_link_scorers import TwoLinkScorers

LATENCY_MODELS: Mapping[ModelName, Callable[[Rates], LatencyModel]] = MappingProxyType(
    {
        ModelName.SCORES_THEN_ROWS: ScoresThenRows,
        ModelName.PARALLEL: ParallelScorers,
        ModelName.TWO_LINKS: TwoLinkScorers,
    }
)
