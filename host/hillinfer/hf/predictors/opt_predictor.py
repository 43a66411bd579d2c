# SPDX-License-Identifier: Apache-2.0
"""Queries of OPT."""

from __future__ import annotations

from typing import Any

import torch

from hillinfer.hf.predictors.query_predictor import QueryPredictor, Rotary


class OptPredictor(QueryPredictor):
    """OPT scales its query itself, and its positions are in the hidden states already."""

    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query; see `QueryPredictor`."""
        attention = layer.self_attn
        if layer.do_layer_norm_before:
            hidden = layer.self_attn_layer_norm(hidden)
        query: torch.Tensor = attention.q_proj(hidden) * attention.scaling
        return query.view(*hidden.shape[:-1], -1, attention.head_dim).transpose(1, 2)

    def scaling(self, layer: Any) -> float:
        """Return 1: the query is scaled already."""
        return 1.0
