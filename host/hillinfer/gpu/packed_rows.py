# SPDX-License-Identifier: Apache-2.0
"""Rows packed where the model computes."""

from __future__ import annotations

import torch


def packed_rows(keys: torch.Tensor, values: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return what `RowLayout.pack` writes, as a tensor beside the model.

    Parameters
    ----------
    keys, values
        Stored type, (kv_heads, tokens, head_dim).
    row_bytes
        Bytes of a row.

    Returns
    -------
    uint8 (tokens, row_bytes), contiguous.
    """
    tokens = keys.shape[1]
    parts = [states.transpose(0, 1).reshape(tokens, -1) for states in (keys, values)]
    filled = 2 * parts[0].shape[1]
    padding = keys.new_zeros((tokens, row_bytes // keys.element_size() - filled))
    return torch.cat([*parts, padding], dim=1).view(torch.uint8)
