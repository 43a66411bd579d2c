# SPDX-License-Identifier: Apache-2.0
"""Reading the last tokens of a text in one pass, each with a selected set of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from hillinfer.hf.attention import refuse_arguments
from hillinfer.hf.features import check_model, check_uses_interface, check_versions
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer_bench.quality.policies import (
    Attending,
    LayerQueries,
    SelectionPolicy,
    causal_mask,
)


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads; threads started inside take this number over."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


class Continuation(Cache):  # type: ignore[misc]
    """Lets one forward pass continue a prefix without changing it.

    Parameters
    ----------
    prefix
        What came before.
    policy
        Selects tokens for each query of the pass; None lets every query see everything before it.
    """

    def __init__(self, prefix: Prefix, policy: SelectionPolicy | Attending | None) -> None:
        super().__init__(
            layers=[
                ContinuationLayer(prefix, layer, policy) for layer in range(prefix.shape.layers)
            ]
        )


class ContinuationLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `Continuation`; the key it returns carries it to the attention function."""

    is_sliding = False
    is_compileable = False

    def __init__(
        self, prefix: Prefix, layer: int, policy: SelectionPolicy | Attending | None
    ) -> None:
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


ATTENTION_NAME = "hillinfer_quality"


@contextmanager
def selecting(model: Any) -> Iterator[None]:
    """Let a model attend through the policies of `Continuation` caches, and through no other.

    Raises
    ------
    UnsupportedFeatureError
        Where the model cannot work with selected tokens.
    """
    check_versions()
    check_model(model)
    previous = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        check_uses_interface(model, ATTENTION_NAME)
        yield
    finally:
        model.set_attn_implementation(previous)


def attend_masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend in float32 to what each query sees.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim).
    keys, values
        (kv_heads, N, head_dim).
    seen
        bool of shape (1 or kv_heads, queries, N).
    scaling
        Factor on inner products.

    Returns
    -------
    float32 of shape (query_heads, queries, head_dim).
    """
    heads, count, head_dim = query.shape
    kv_heads, tokens, _ = keys.shape
    rows = query.float().reshape(kv_heads, -1, head_dim)
    scores = (rows @ keys.float().mT * scaling).view(kv_heads, -1, count, tokens)
    weights = torch.softmax(scores.masked_fill_(~seen[:, None], -torch.inf), dim=-1)
    out = weights.view(kv_heads, -1, tokens) @ values.float()
    return out.view(heads, count, head_dim)


def seen_tokens(policy: SelectionPolicy | None, layer: LayerQueries) -> torch.Tensor:
    """Return what each query sees, bool of shape (1 or kv_heads, queries, N).

    Everything up to its own token where there is no policy.
    """
    count, tokens = len(layer.queries), len(layer.keys)
    if policy is None:
        return causal_mask(count, tokens)[None]
    selected = policy.select(layer)
    seen = torch.zeros(len(selected[0]), count, tokens, dtype=torch.bool)
    for i, positions in enumerate(selected):
        seen[:, i].scatter_(1, torch.from_numpy(positions), value=True)
    return seen


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention interface asks, batches of one only."""
    refuse_arguments(kwargs)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer = LayerQueries(
        query[0].transpose(0, 1).float().cpu(), key[0].transpose(0, 1).cpu(), scaling
    )
    policy = key._hillinfer_continuation.policy  # type: ignore[attr-defined]
    if isinstance(policy, Attending):
        out = policy.attend(layer, value[0].transpose(0, 1).cpu()).to(query.device)
    else:
        seen = seen_tokens(policy, layer)
        out = attend_masked(query[0], key[0], value[0], seen.to(query.device), scaling)
    return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make no mask: what a query sees is decided in each layer."""


@torch.no_grad()
def forced_logits(
    model: Any,
    prefix: Prefix,
    token_ids: Sequence[int],
    policy: SelectionPolicy | Attending | None,
) -> torch.Tensor:
    """Return the logits after each of `token_ids`, every one with a selected set of its own.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode, inside `selecting`.
    prefix
        What comes before.
    token_ids
        The tokens that are read sparsely; each sees only itself and what comes before it.
    policy
        Selects tokens, or attends in a way of its own; None for the full cache.

    Returns
    -------
    float32 of shape (tokens, vocabulary), on the CPU.
    """
    ids = torch.tensor([list(token_ids)], device=model.device)
    output = model(input_ids=ids, past_key_values=Continuation(prefix, policy), use_cache=True)
    logits: torch.Tensor = output.logits[0].float().cpu()
    return logits
