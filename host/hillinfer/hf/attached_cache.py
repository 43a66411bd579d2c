# SPDX-License-Identifier: Apache-2.0
"""What an attached model and its attention function ask of a cache."""

from __future__ import annotations

from abc import abstractmethod

import torch
from transformers.cache_utils import Cache

from hillinfer.hf.turns import Use
from hillinfer.timeline.forward_spans import ForwardSpans


class AttachedCache(Cache):  # type: ignore[misc]
    """A cache that stores and attends by itself; its layers are `AttachedLayer`s.

    A forward pass is `begin_forward`, then `store` and `attend` of every layer, then `end_forward`,
    which is left out where the pass broke off.

    Attributes
    ----------
    spans
        Where the time of its calls is noted.
    """

    spans: ForwardSpans

    @abstractmethod
    def index_length(self, layer: int) -> int:
        """Return the tokens of a layer, padding included."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a model whose number type is none that this cache was made for."""

    def check_positions(self, positions: torch.Tensor | None) -> None:
        """Refuse positions (batch, tokens) of a pass that began, where this cache knows better."""

    @abstractmethod
    def check_continues(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Refuse full ids (batch, tokens) that do not start with what this cache holds."""

    @abstractmethod
    def begin_generate(self, use: Use) -> Use | None:
        """Learn that a call of `generate` brings tokens, and return the one it is made in."""

    @abstractmethod
    def end_generate(self, around: Use | None) -> None:
        """Learn that the call is over, however it ended; `around` is what its begin returned."""

    @abstractmethod
    def begin_forward(self, ids: torch.Tensor, mask: torch.Tensor | None, use: Use) -> None:
        """Learn which tokens (batch, tokens) a forward pass brings; mask of zeros for padding.

        The use is over when the pass is, however it ends.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Learn that the forward pass got through."""

    @abstractmethod
    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's new keys and values, (batch, kv_heads, tokens, head_dim)."""

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to what `store` completed.

        (batch, query_heads, tokens, head_dim) in, (batch, tokens, query_heads, head_dim) out.
        """

    @property
    def takes_predictions(self) -> bool:
        """Whether `announce` is worth the price of a predicted query."""
        return False

    def announce(self, layer: int, query: torch.Tensor, scaling: float) -> None:
        """Learn a layer's predicted queries, (batch, query_heads, 1, head_dim), before its turn."""
