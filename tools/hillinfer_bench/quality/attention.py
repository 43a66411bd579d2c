# SPDX-License-Identifier: Apache-2.0
"""Attention where every query of a forward pass has a selected set of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hillinfer.hf.attention import refuse_arguments
from hillinfer.hf.features import check_model, check_uses_interface, check_versions
from hillinfer_bench.policies.layer_queries import LayerQueries, causal_mask
from hillinfer_bench.policies.selection_policy import SelectionPolicy

NAME = "hillinfer_quality"


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
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    try:
        check_uses_interface(model, NAME)
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
    seen = seen_tokens(key._hillinfer_continuation.policy, layer)  # type: ignore[attr-defined]
    out = attend_masked(query[0], key[0], value[0], seen.to(query.device), scaling)
    return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make no mask: what a query sees is decided in each layer."""
