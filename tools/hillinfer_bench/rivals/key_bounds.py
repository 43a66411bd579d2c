# SPDX-License-Identifier: Apache-2.0
"""The least and largest key of pages of tokens, and what they say of inner products."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import round_up
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.row_products import RowProducts
from hillinfer_bench.rivals.setup import RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS


class KeyBounds:
    """Per page and KV head the largest and the least key of each channel, in the stored type.

    The larger of query times either, summed over channels, is what no inner product of the page
    exceeds (Quest's criterion; LeoAM's KV abstract holds the same two vectors).

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    page_tokens
        Tokens of a page, a power of two up to 64.
    dtype
        The stored type.
    meter
        Counts the bounds.
    """

    def __init__(
        self, setup: RivalSetup, page_tokens: int, dtype: torch.dtype, meter: Meter
    ) -> None:
        shape = setup.shape
        self.page_tokens = page_tokens
        self.pages = round_up(setup.context, GROUP_TOKENS) // page_tokens
        self._products = RowProducts(shape, setup.block_rows)
        size = (shape.layers, setup.batch, 2, self.pages, shape.kv_heads, shape.head_dim)
        self._bounds = meter.tensor(size, dtype)

    def add(self, layer: int, row: int, first: int, keys: torch.Tensor) -> None:
        """Take a group's keys, (kv_heads, 64, head_dim), of tokens from `first` on."""
        heads, _, head_dim = keys.shape
        paged = keys.transpose(0, 1).reshape(-1, self.page_tokens, heads, head_dim)
        at = first // self.page_tokens
        pages = slice(at, at + len(paged))
        self._bounds[layer, row, 0, pages] = paged.amax(1)
        self._bounds[layer, row, 1, pages] = paged.amin(1)

    def scores(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, pages: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Score pages by the softmax of their bounds, summed over query heads.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        pages
            int64 numbers, ascending.
        """
        if not len(pages):
            return np.zeros(0, np.float32)
        # A bound is linear in the positive and in the negative part of a query.
        rising, falling = query.float().clamp(min=0), query.float().clamp(max=0)
        logits, others = torch.empty(2, len(query), len(pages))
        for part, sign, out in ((0, rising, logits), (1, falling, others)):
            rows = self._bounds[layer, row, part].view(torch.uint8).view(self.pages, -1).numpy()
            self._products.logits(sign, scaling, rows, pages, out)
        scores: NDArray[np.float32] = torch.softmax(logits.add_(others), -1).sum(0).numpy()
        return scores

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._bounds = torch.empty(0)
