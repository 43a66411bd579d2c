# SPDX-License-Identifier: Apache-2.0
"""A cache that hands out a prefix and the tokens of one forward pass, and keeps neither."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hillinfer.storage.row_layout import RowLayout
from hillinfer_bench.policies.selection_policy import SelectionPolicy
from hillinfer_bench.quality.prefix import Prefix


class Continuation(Cache):  # type: ignore[misc]
    """Lets one forward pass continue a prefix without changing it.

    Parameters
    ----------
    prefix
        What came before.
    policy
        Selects tokens for each query of the pass; None lets every query see everything before it.
    """

    def __init__(self, prefix: Prefix, policy: SelectionPolicy | None) -> None:
        super().__init__(
            layers=[
                ContinuationLayer(prefix, layer, policy) for layer in range(prefix.shape.layers)
            ]
        )


class ContinuationLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `Continuation`; the key it returns carries it to the attention function."""

    is_sliding = False
    is_compileable = False

    def __init__(self, prefix: Prefix, layer: int, policy: SelectionPolicy | None) -> None:
        super().__init__()
        self._prefix = prefix
        self._layer = layer
        self._layout = RowLayout(prefix.shape)
        self.policy = policy

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prefix and new tokens, (1, kv_heads, N, head_dim) in the stored type."""
        keys, values = (
            torch.cat([past[self._layer], self._layout.round(states)[0]], dim=2)
            for past, states in (
                (self._prefix.keys, key_states),
                (self._prefix.values, value_states),
            )
        )
        keys._hillinfer_continuation = self  # type: ignore[attr-defined]
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: nothing is kept."""

    def get_seq_length(self) -> int:
        """Return the tokens of the prefix."""
        return self._prefix.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask and its offset, before `update`."""
        return self._prefix.tokens + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: nothing bounds the length."""
        return -1
