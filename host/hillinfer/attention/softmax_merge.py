# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention, one block of rows after the other."""

from __future__ import annotations

import torch

from hillinfer.attention.kernels import attend_block, attend_causal


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
    """

    def __init__(self, query: torch.Tensor, scaling: float) -> None:
        self._query = query
        self._scaling = scaling
        self._out: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add_block(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Attend to a block that every query sees; (kv_heads, tokens, head_dim) each."""
        self._merge(*attend_block(self._query, keys, values, self._scaling))

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Attend to the queries' own tokens, causally."""
        self._merge(*attend_causal(self._query, keys, values, self._scaling))

    def result(self) -> torch.Tensor:
        """Return the merged output, (query_heads, queries, head_dim)."""
        if self._out is None:
            raise ValueError("attention over no rows: add a block first")
        return self._out.to(self._query.dtype)

    def _merge(self, out: torch.Tensor, log_sum: torch.Tensor) -> None:
        if self._out is None or self._log_sum is None:
            self._out, self._log_sum = out, log_sum
            return
        total = torch.logaddexp(self._log_sum, log_sum)
        old = torch.exp(self._log_sum - total)[..., None]
        new = torch.exp(log_sum - total)[..., None]
        self._out = self._out.float() * old + out.float() * new
        self._log_sum = total
