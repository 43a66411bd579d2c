# SPDX-License-Identifier: Apache-2.0
"""Whole pages of tokens, ranked by bounds on their inner products."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_bench.policies.selection_policy import SelectionPolicy

PAGE_TOKENS = 16


class Pages(SelectionPolicy):
    """Selects pages of 16 tokens by their least and largest keys, per KV head (as Quest does).

    A page's score for a query head is an upper bound of its tokens' inner products: the sum over
    channels of the larger of query times least key and query times largest key. Query heads that
    share a KV head add their bounds. Pages are taken whole, best first, until k tokens are
    reached; of the last page only as many as fit, lower positions first. Kept tokens are always
    among them, as for every policy.
    """

    def select(self, layer: LayerQueries) -> list[NDArray[np.int64]]:
        """Rank pages; see `SelectionPolicy`."""
        # A bound is linear in the positive and in the negative part of the query, so the sum over
        # the query heads of a KV head is the bound of their summed parts.
        count, _, head_dim = layer.queries.shape
        grouped = layer.queries.view(count, layer.keys.shape[1], -1, head_dim)
        rising, falling = grouped.clamp(min=0).sum(2), grouped.clamp(max=0).sum(2)
        least, largest = _running_bounds(layer.keys.float())
        ends = slice(PAGE_TOKENS - 1, None, PAGE_TOKENS)
        scores = _bounds(rising, falling, least[ends], largest[ends])
        chosen = []
        for i, length in enumerate(layer.lengths):
            pages = -(-length // PAGE_TOKENS)
            own = scores[i, :, :pages].clone()
            # The page of the query's own token holds what has come of it so far.
            last = slice(length - 1, length)
            own[:, -1:] = _bounds(rising[i : i + 1], falling[i : i + 1], least[last], largest[last])
            chosen.append(self.best(own.repeat_interleave(PAGE_TOKENS, -1)[:, :length]))
        return chosen


def _running_bounds(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return least and largest key per channel of each page up to each token.

    (N, kv_heads, head_dim) in; the last page is filled up with its last token.
    """
    missing = -len(keys) % PAGE_TOKENS
    padded = torch.cat([keys, keys[-1:].expand(missing, -1, -1)])
    paged = padded.view(-1, PAGE_TOKENS, *keys.shape[1:])
    least, largest = paged.cummin(1).values, paged.cummax(1).values
    return least.flatten(0, 1), largest.flatten(0, 1)


def _bounds(
    rising: torch.Tensor, falling: torch.Tensor, least: torch.Tensor, largest: torch.Tensor
) -> torch.Tensor:
    """Return the bounds of pages, (queries, kv_heads, pages)."""
    return torch.einsum("qhd,phd->qhp", rising, largest) + torch.einsum(
        "qhd,phd->qhp", falling, least
    )
