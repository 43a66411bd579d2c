# SPDX-License-Identifier: Apache-2.0
"""What a selection policy sees of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerQueries:
    """Queries of the newest tokens of a sequence in one layer, and the keys of all its tokens.

    Query i belongs to the token at position `first_length` - 1 + i and sees that token and those
    before it, as if the tokens had been decoded one after the other.

    Parameters
    ----------
    queries
        float32 of shape (queries, query_heads, head_dim) on the CPU, after rotary embedding.
    keys
        The stored type, shape (N, kv_heads, head_dim), on the CPU.
    scaling
        Factor on inner products.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float

    @property
    def first_length(self) -> int:
        """Tokens that the first query sees."""
        return len(self.keys) - len(self.queries) + 1

    @property
    def lengths(self) -> range:
        """Tokens that each query sees, its own included."""
        return range(self.first_length, len(self.keys) + 1)

    def inner_products(self) -> torch.Tensor:
        """Return scaled inner products in float32, (kv_heads, group, queries, N).

        Tokens after a query's own are -inf.
        """
        count, _, head_dim = self.queries.shape
        tokens, kv_heads, _ = self.keys.shape
        rows = self.queries.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        products = rows @ self.keys.float().permute(1, 2, 0) * self.scaling
        products = products.view(kv_heads, -1, count, tokens)
        return products.masked_fill_(~causal_mask(count, tokens), -torch.inf)


def causal_mask(queries: int, tokens: int) -> torch.Tensor:
    """Return which of `tokens` the newest `queries` of them see, bool (queries, tokens)."""
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
