# SPDX-License-Identifier: Apache-2.0
"""The part of a context that is read densely, once, for every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hillinfer.model_shape import ModelShape
from hillinfer.storage.row_layout import RowLayout


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a prefix, in the stored type as rows are (design, section 2).

    Parameters
    ----------
    shape
        The model's.
    keys, values
        One tensor per layer, (1, kv_heads, tokens, head_dim).
    """

    shape: ModelShape
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return self.keys[0].shape[2]

    @classmethod
    @torch.no_grad()
    def read(cls, model: Any, token_ids: Sequence[int], chunk_tokens: int = 1024) -> Prefix:
        """Read tokens in chunks, each attending to all before it as rounded to the stored type.

        Parameters
        ----------
        model
            A causal language model of transformers, with its own attention.
        token_ids
            What to read.
        chunk_tokens
            Tokens of one forward call.
        """
        shape = ModelShape.from_config(model.config, model.dtype)
        layout = RowLayout(shape)
        layers = [_RoundingLayer(layout) for _ in range(shape.layers)]
        cache = Cache(layers=layers)
        for start in range(0, len(token_ids), chunk_tokens):
            ids = torch.tensor([list(token_ids[start : start + chunk_tokens])], device=model.device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cls(
            shape,
            tuple(layout.round(layer.keys)[0] for layer in layers),
            tuple(layout.round(layer.values)[0] for layer in layers),
        )


class _RoundingLayer(DynamicLayer):  # type: ignore[misc]
    """An ordinary layer of a cache whose keys and values went through the stored type."""

    def __init__(self, layout: RowLayout) -> None:
        super().__init__()
        self._layout = layout

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            self._layout.round(states)[0].to(states.dtype) for states in (key_states, value_states)
        )
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(keys, values, *args, **kwargs)
        return updated
