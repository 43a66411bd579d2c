# SPDX-License-Identifier: Apache-2.0
"""Attention of some queries to one block of rows, with the log of its denominator."""

from __future__ import annotations

import torch

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to every token of a block.

    Query heads that share a KV head are stacked as rows of one matrix, so that no key is copied
    or read twice.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    keys, values
        (kv_heads, tokens, head_dim), the same type and device.
    scaling
        Factor on inner products.

    Returns
    -------
    The normalised output (query_heads, queries, head_dim), and log-sum-exp of the scaled inner
    products, float32 (query_heads, queries).
    """
    heads, queries, head_dim = query.shape
    packed = query.reshape(1, keys.shape[0], -1, head_dim)
    out, log_sum = _attend(packed, keys[None], values[None], scaling)
    return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)


def attend_causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a block of the queries' own tokens, each query to itself and those before it.

    Shapes as in `attend_block`, with as many tokens as queries.
    """
    heads, queries, head_dim = query.shape
    kv_heads = keys.shape[0]
    if query.device.type == "cpu":
        # KV heads stand where the kernel has its batch: it reads the same keys for a whole group.
        shape = (kv_heads, heads // kv_heads, queries, head_dim)
        out, log_sum = _CPU_FLASH(
            query.reshape(shape),
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            is_causal=True,
            scale=scaling,
        )
        return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)
    keys, values = (states.repeat_interleave(heads // kv_heads, dim=0) for states in (keys, values))
    future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    return attend_explicitly(query, keys, values, scaling, future)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.device.type == "cpu":
        out, log_sum = _CPU_FLASH(query, keys, values, scale=scaling)
        return out, log_sum
    return attend_explicitly(query, keys, values, scaling, None)


def attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with plain products, in float32, on a device without a kernel of its own.

    Inner products would overflow FP16, and BF16 would round them coarsely.

    Parameters
    ----------
    query
        (any, rows, head_dim); every leading dimension is the keys', too.
    keys, values
        (any, tokens, head_dim).
    scaling
        Factor on inner products.
    hidden
        Bool (rows, tokens), true where a row must not look; None where it may everywhere.

    Returns
    -------
    As `attend_block`, float32.
    """
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scaling
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    log_sum = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - log_sum[..., None]), values.float()), log_sum
