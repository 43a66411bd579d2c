# SPDX-License-Identifier: Apache-2.0
"""Keys reduced to a few dimensions, kept to speculate with (InfiniGen, section 4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.row_products import RowProducts
from hillinfer_bench.rivals.setup import RivalSetup

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
        size = (shape.layers, setup.batch, setup.context, shape.kv_heads, self.channels)
        self._keys = meter.tensor(size, dtype)
        reduced = replace(shape, head_dim=self.channels)
        self._products = RowProducts(reduced, setup.block_rows)
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
        self._keys[layer, row, first : first + keys.shape[1]] = reduced.transpose(0, 1)

    def logits(
        self, layer: int, row: int, query: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        """Compute approximate inner products of the first tokens, float32 (query_heads, tokens)."""
        directions = self._directions[layer, row]
        grouped = query.float().reshape(len(directions), -1, query.shape[-1])
        reduced = (grouped @ directions).reshape(len(query), 1, -1)
        tokens = out.shape[1]
        rows = self._keys[layer, row, :tokens].view(torch.uint8).view(tokens, -1).numpy()
        self._products.logits(reduced, scaling, rows, np.arange(tokens), out)

    def close(self) -> None:
        """Give the memory back; the meter's owner counts it."""
        self._keys = self._directions = torch.empty(0)
