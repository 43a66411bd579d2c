# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a cache in memory that copies no key for the heads that share it.

transformers repeats keys and values for every query head before torch attends. Behind a long
context that copies the whole cache in every layer, which takes as long as attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hillinfer.errors import UnsupportedFeatureError

NAME = "hillinfer-grouped-query"
# What the bits are those of.
_BASE = "sdpa"


@dataclass(frozen=True)
class _UngroupedModule:
    """What transformers' function asks a module for, where nothing is left to be repeated."""

    is_causal: bool


def grouped_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as transformers' SDPA does, bit for bit, with each key where it lies.

    KV heads stand where torch's kernel has its batch, and the query heads of a group where it has
    heads: a view with stride 0 gives them all the same key. Where that is no gain or not possible
    (several sequences, another device, dropout, gradients), it is transformers' own function.

    Parameters
    ----------
    query
        (batch, query_heads, tokens, head_dim).
    key, value
        (batch, kv_heads, all_tokens, head_dim).
    attention_mask
        (batch, 1, tokens, all_tokens) or None.

    Returns
    -------
    Output (batch, tokens, query_heads, head_dim), and None.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if not (
        batch == 1
        and group > 1
        and query.device.type == "cpu"
        and not kwargs.get("dropout")
        and not (torch.is_grad_enabled() and query.requires_grad)
        and (attention_mask is None or attention_mask.shape[:2] == (1, 1))
    ):
        out: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return out
    shared = (kv_heads, group, key.shape[2], head_dim)
    attended, _ = sdpa_attention_forward(
        _UngroupedModule(bool(getattr(module, "is_causal", True))),
        query.reshape(kv_heads, group, tokens, head_dim),
        key[0, :, None].expand(shared),
        value[0, :, None].expand(*shared[:3], value.shape[3]),
        attention_mask,
        **kwargs,
    )
    # (kv_heads, tokens, group, head_dim) so far.
    return attended.transpose(0, 1).reshape(1, tokens, heads, value.shape[3]), None


@contextmanager
def grouped_query(model: PreTrainedModel) -> Iterator[None]:
    """Let an unmodified model read its cache where it lies; it is as it was behind the block.

    Raises
    ------
    UnsupportedFeatureError
        Where the model attends in another way than by SDPA.
    """
    before = model.config._attn_implementation
    if before != _BASE:
        raise UnsupportedFeatureError(
            f"the model's attention is {before!r}, and grouped_query has the bits of {_BASE!r}: "
            f"call model.set_attn_implementation({_BASE!r}) first, or leave grouped_query out (an "
            "attached model does the same for its ordinary caches)"
        )
    AttentionInterface.register(NAME, grouped_query_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
