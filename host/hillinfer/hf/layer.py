# SPDX-License-Identifier: Apache-2.0
"""What transformers and the attention function ask of a cache and of each of its layers."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hillinfer.hf.turns import Use
from hillinfer.trace.trace_file import ForwardSpans

# --- a cache ---


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


# --- a layer ---


class HillInferLayer(CacheLayerMixin):  # type: ignore[misc]
    """Hands a layer's new keys and values to the cache and returns them unchanged in length.

    Attention modules pass what `update` returns on to the attention function untouched, so the
    returned key carries the layer it belongs to.

    Parameters
    ----------
    cache
        The cache this layer is part of.
    layer
        Index of the decoder layer.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, cache: AttachedCache, layer: int) -> None:
        super().__init__()
        # Without a cycle the cache and its space on the drive go when the last user drops it.
        self._cache = weakref.ref(cache)
        self.layer = layer

    @property
    def cache(self) -> AttachedCache:
        """The cache this layer is part of."""
        cache = self._cache()
        assert cache is not None, "a layer is only used through its cache"
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: memory is taken as rows come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (batch, kv_heads, tokens, head_dim) and return them."""
        # As in the attention function, which says why.
        if torch.compiler.is_dynamo_compiling():
            stored: tuple[torch.Tensor, torch.Tensor] = self._left_out(key_states, value_states)
            return stored
        cache = self.cache
        with cache.spans.store(self.layer):
            cache.store(self.layer, key_states, value_states)
        key_states._hillinfer_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    _left_out = torch.compiler.disable(update)  # type: ignore[no-untyped-call]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask and its offset, before `update`."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens of this layer, padding included."""
        return self.cache.index_length(self.layer)

    def get_max_length(self) -> int:
        """Return -1: only the drive bounds the length."""
        return -1

    def reset(self) -> None:
        """Do nothing: the cache's own `reset` clears all layers at once."""

    def offload(self) -> None:
        """Do nothing: rows are on the drive already."""

    def prefetch(self) -> None:
        """Do nothing: rows are fetched when they are selected."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: beams are reordered for all layers at once by the cache."""
        raise RuntimeError("reorder the whole cache, not one layer")
