# SPDX-License-Identifier: Apache-2.0
"""Keys reduced to a few dimensions, kept to speculate with (InfiniGen, section 4)."""

from __future__ import annotations

import torch

from hillinfer.rivals.meter import Meter
from hillinfer.rivals.selection import head_logits
from hillinfer.rivals.setup import RivalSetup

# The share of channels that InfiniGen keeps.
RATIO = 0.3


class PartialKeys:
    """Every key's coordinates along the directions in which a head's keys differ most.

    The directions are found once for each layer, sequence and KV head, from the first keys that
    come: those with the largest singular values. What keys have in common shifts all inner products
    alike and changes no attention weight.

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    dtype
        The stored type.
    meter
        Counts keys and directions.
    """

    def __init__(self, setup: RivalSetup, dtype: torch.dtype, meter: Meter) -> None:
        shape = setup.shape
        self.channels = max(1, round(RATIO * shape.head_dim))
        head = (shape.layers, setup.batch, shape.kv_heads)
        self._block_rows = setup.block_rows
        self._keys = meter.tensor((*head, setup.context, self.channels), dtype)
        self._directions = meter.tensor((*head, shape.head_dim, self.channels), torch.float32)

    def add(self, layer: int, row: int, first: int, keys: torch.Tensor) -> None:
        """Take the keys (kv_heads, tokens, head_dim) of tokens from `first` on."""
        wide = keys.float()
        if first == 0:
            centred = wide - wide.mean(1, keepdim=True)
            # Ascending eigenvalues, the squares of the singular values.
            vectors = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors
            self._directions[layer, row] = vectors[:, :, -self.channels :]
        reduced = wide @ self._directions[layer, row]
        self._keys[layer, row, :, first : first + keys.shape[1]] = reduced

    def logits(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        """Compute approximate inner products of the first tokens, float32 (query_heads, tokens)."""
        directions = self._directions[layer, row]
        grouped = query.float().reshape(len(directions), -1, query.shape[-1])
        reduced = (grouped @ directions).reshape(len(query), 1, -1)
        for start in range(0, out.shape[1], self._block_rows):
            block = slice(start, min(start + self._block_rows, out.shape[1]))
            head_logits(reduced, self._keys[layer, row, :, block], scaling, out[:, block])

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._keys = self._directions = torch.empty(0)
