# SPDX-License-Identifier: Apache-2.0
"""The attention that every rival on a drive uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hillinfer.attention.softmax_merge import SoftmaxMerge


def compute_type(query: torch.Tensor) -> torch.dtype:
    """Return the query's type, but float32 for FP16, whose kernels are slow and coarse on a CPU."""
    return torch.float32 if query.dtype == torch.float16 else query.dtype


def attend_blocks(
    query: torch.Tensor,
    blocks: Iterable[tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
) -> torch.Tensor:
    """Attend to blocks of keys and values as if they were one.

    Parameters
    ----------
    query
        (query_heads, 1, head_dim).
    blocks
        Keys and values, (kv_heads, tokens, head_dim) in the stored type; empty ones are skipped.
    scaling
        Factor on inner products.

    Returns
    -------
    (query_heads, 1, head_dim) in the query's type.
    """
    wide = query.to(compute_type(query))
    merge = SoftmaxMerge(wide, scaling)
    for keys, values in blocks:
        if keys.shape[1]:
            merge.add_block(keys.to(wide.dtype), values.to(wide.dtype))
    return merge.result().to(query.dtype)


def cut(
    keys: torch.Tensor, values: torch.Tensor, block_rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values, (kv_heads, tokens, head_dim), at most `block_rows` tokens at a time.

    Blocks that are widened to float32 then stay in the processor's caches.
    """
    for start in range(0, keys.shape[1], block_rows):
        yield keys[:, start : start + block_rows], values[:, start : start + block_rows]
