# SPDX-License-Identifier: Apache-2.0
"""Queries of models with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half

from hillinfer.hf.predictors.query_predictor import QueryPredictor, Rotary


class RotaryPredictor(QueryPredictor):
    """Llama, Mistral, Qwen2 and Qwen3: norm, projection, norm of each head where there is one."""

    def predict(self, layer: Any, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Return the query; see `QueryPredictor`."""
        assert rotary is not None
        attention = layer.self_attn
        query: torch.Tensor = attention.q_proj(layer.input_layernorm(hidden))
        query = query.view(*hidden.shape[:-1], -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        query = query.transpose(1, 2)
        # What `apply_rotary_pos_emb` does to a query, without a key to turn beside it.
        cosines, sines = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
        turned: torch.Tensor = query * cosines + rotate_half(query) * sines
        return turned

    def scaling(self, layer: Any) -> float:
        """Return the layer's own factor."""
        return float(layer.self_attn.scaling)
