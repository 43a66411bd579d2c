# SPDX-License-Identifier: Apache-2.0
"""Inner products with rows of keys, and weighted sums of rows of values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.model_shape import ModelShape
from hillinfer.native.addresses import row_addresses
from hillinfer.storage.row_layout import RowLayout
from hillinfer_bench.rivals.native_products import NativeProducts, native_products
from hillinfer_bench.rivals.selection import head_logits


class RowProducts:
    """What rivals rank by, and attend with where keys and values lie apart.

    The native library reads rows where they lie, as it does for HillInfer; without it torch widens
    some rows at a time.

    Parameters
    ----------
    shape
        Of a row: `head_dim` items of each KV head at its start.
    block_rows
        Rows that torch widens at a time.
    make_native
        Opens the native library's products; returns None where torch is to compute.
    """

    def __init__(
        self,
        shape: ModelShape,
        block_rows: int,
        make_native: Callable[[ModelShape], NativeProducts | None] = native_products,
    ) -> None:
        self._shape = shape
        self._kind = RowLayout(shape).stored_type
        self._block_rows = block_rows
        self._native = make_native(shape)

    def logits(
        self,
        query: torch.Tensor,
        scaling: float,
        rows: NDArray[np.uint8],
        chosen: NDArray[np.int64],
        out: torch.Tensor,
    ) -> None:
        """Compute scaled inner products.

        Parameters
        ----------
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on them.
        rows
            Contiguous uint8 (any, row_bytes).
        chosen
            Which rows, int64.
        out
            Float32 (query_heads, len(chosen)); its rows may lie apart.
        """
        if not len(chosen):
            return
        if self._native is not None and query.device.type == "cpu":
            self._native.logits(query[:, 0], scaling, row_addresses(rows, chosen), out)
            return
        for start in range(0, len(chosen), self._block_rows):
            block = slice(start, start + self._block_rows)
            keys = self._states(rows[chosen[block]], 0)
            head_logits(query, keys, scaling, out[:, block])

    def add_weighted(
        self,
        weights: torch.Tensor,
        rows: NDArray[np.uint8],
        chosen: NDArray[np.int64],
        out: torch.Tensor,
        start_byte: int = 0,
    ) -> None:
        """Add values by weights.

        Parameters
        ----------
        weights
            Float32 (query_heads, len(chosen)); its rows may lie apart.
        rows, chosen
            As for `logits`.
        out
            Contiguous float32 (query_heads, head_dim).
        start_byte
            Where values begin in a row.
        """
        if not len(chosen):
            return
        if self._native is not None:
            addresses = row_addresses(rows, chosen) + np.uint64(start_byte)
            self._native.add_weighted(weights, addresses, out)
            return
        shape = self._shape
        grouped = weights.reshape(shape.kv_heads, -1, len(chosen))
        sums = out.view(shape.kv_heads, -1, shape.head_dim)
        for start in range(0, len(chosen), self._block_rows):
            block = slice(start, start + self._block_rows)
            values = self._states(rows[chosen[block]], start_byte)
            sums += torch.matmul(grouped[:, :, block], values.float())

    def _states(self, rows: NDArray[np.uint8], start_byte: int) -> torch.Tensor:
        """View rows as (kv_heads, rows, head_dim)."""
        shape = self._shape
        width = 2 * shape.kv_heads * shape.head_dim
        own = torch.from_numpy(rows)[:, start_byte : start_byte + width].contiguous()
        return own.view(self._kind).view(-1, shape.kv_heads, shape.head_dim).transpose(0, 1)
