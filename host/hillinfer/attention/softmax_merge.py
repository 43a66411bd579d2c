# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention, one block of rows after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hillinfer.attention.kernels import attend_block, attend_causal

BlockKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


class SoftmaxMerge:
    """Collects attention over blocks as if all rows had been there at once.

    Each block gives an output and the log of its denominator; two of those merge exactly. The
    order of blocks changes output bits, so callers add them in ascending position.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    scaling
        Factor on inner products.
    attend
        The kernel for a block that all of some queries see.
    """

    def __init__(
        self, query: torch.Tensor, scaling: float, attend: BlockKernel = attend_block
    ) -> None:
        self._attend = attend
        self._query = query
        self._scaling = scaling
        self._out: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add_block(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to a block that the queries from `first` on see, all of it.

        Parameters
        ----------
        keys, values
            (kv_heads, tokens, head_dim) each.
        first
            The first of these queries.
        """
        out, log_sum = self._attend(self._query[:, first:], keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to as many queries' own tokens, causally; the first query is `first`.

        Parameters as in `add_block`.
        """
        own = self._query[:, first : first + keys.shape[1]]
        out, log_sum = attend_causal(own, keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def result(self) -> torch.Tensor:
        """Return the merged output, (query_heads, queries, head_dim)."""
        if self._out is None:
            raise ValueError("attention over no rows: add a block first")
        return self._out.to(self._query.dtype)

    def _merge(self, out: torch.Tensor, log_sum: torch.Tensor, first: int) -> None:
        if self._out is None or self._log_sum is None:
            if out.shape == self._query.shape:
                self._out, self._log_sum = out, log_sum
                return
            # Some queries wait for their first block, whose weight is then exactly 1.
            self._out = torch.zeros_like(self._query, dtype=torch.float32)
            self._log_sum = torch.full_like(self._out[..., 0], -torch.inf)
        # In place: these pass through memory once per block, which is what merging costs.
        self._out = self._out.float()
        part = slice(first, first + out.shape[1])
        old = self._log_sum[:, part]
        weight = torch.sigmoid(log_sum - old)
        self._out[:, part].lerp_(out.float(), weight[..., None])
        self._log_sum[:, part] = torch.logaddexp(old, log_sum)
