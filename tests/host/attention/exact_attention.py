# SPDX-License-Identifier: Apache-2.0
"""Attention in one shot and in float64: what every kernel is held against."""

import torch


def exact_attention(query, keys, values, scaling, visible=None):
    """Attend with (query_heads, queries, d) to (kv_heads, tokens, d), and give log-sum-exp.

    `visible` is bool (queries, tokens) or (query_heads, queries, tokens), true where a query looks.
    """
    group_size = query.shape[0] // keys.shape[0]
    keys, values = (states.double().repeat_interleave(group_size, 0) for states in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scaling
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def causal(queries, tokens):
    """Return which of `tokens` the last `queries` of them see, bool (queries, tokens)."""
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)


def random_states(seed, query_heads, kv_heads, queries, tokens, head_dim, dtype=torch.float32):
    """Return query, keys and values whose scores lie a few units apart."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(query_heads, queries, head_dim), *[(kv_heads, tokens, head_dim)] * 2]
    return [(torch.randn(shape, generator=generator) * 1.5).to(dtype) for shape in shapes]
