# SPDX-License-Identifier: Apache-2.0
"""The attention that every rival on a drive uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.host_attention import host_attention
from hillinfer.attention.softmax_merge import SoftmaxMerge
from hillinfer.model_shape import ModelShape
from hillinfer.native.addresses import row_addresses
from hillinfer.storage.row_layout import RowLayout

# A contiguous uint8 array (any, row_bytes), and which of its rows, int64.
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def whole(rows: NDArray[np.uint8]) -> Part:
    """Return all rows of an array as a part of a batch."""
    return rows, np.arange(len(rows))


class BlockAttention:
    """Attends to rows where they lie with the native library, or block by block with torch.

    Parameters
    ----------
    shape, layout
        What is in a row.
    block_rows
        Rows that torch attends to at a time: what it widens stays in the processor's caches.
    """

    def __init__(self, shape: ModelShape, layout: RowLayout, block_rows: int) -> None:
        self._native = host_attention(shape)
        self._layout = layout
        self._block_rows = block_rows

    def attend(
        self,
        query: torch.Tensor,
        batches: Iterable[Sequence[Part]],
        scaling: float,
    ) -> torch.Tensor:
        """Attend to batches of rows as if they were one.

        Parameters
        ----------
        query
            (query_heads, 1, head_dim).
        batches
            Parts that are there at once. Every batch but the last has a multiple of 64 rows.
        scaling
            Factor on inner products.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        if self._native is None or query.device.type != "cpu":
            return self._with_torch(query, batches, scaling)
        softmax = self._native.begin(query[:, 0], scaling)
        for batch in batches:
            places = [row_addresses(*part) for part in batch]
            softmax.add([np.concatenate(places)])
        return softmax.result()[:, None].to(query.dtype)

    def _with_torch(
        self,
        query: torch.Tensor,
        batches: Iterable[Sequence[Part]],
        scaling: float,
    ) -> torch.Tensor:
        # FP16 kernels are slow and coarse on a CPU.
        kind = torch.float32 if query.dtype == torch.float16 else query.dtype
        merge = SoftmaxMerge(query.to(kind), scaling)
        for batch in batches:
            for rows, chosen in batch:
                for start in range(0, len(chosen), self._block_rows):
                    block = torch.from_numpy(rows[chosen[start : start + self._block_rows]])
                    keys, values = self._layout.keys(block), self._layout.values(block)
                    merge.add_block(keys.transpose(0, 1).to(kind), values.transpose(0, 1).to(kind))
        return merge.result().to(query.dtype)
