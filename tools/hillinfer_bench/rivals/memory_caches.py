# SPDX-License-Identifier: Apache-2.0
"""Ways to hold a whole KV cache in memory and attend to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from hillinfer.attention.kernels import attend_block
from hillinfer.storage.row_layout import RowLayout
from hillinfer_bench.rivals.block_attention import BlockAttention, whole
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.setup import RivalSetup

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class MemoryCache(Protocol):
    """Keys and values of several sequences and layers, written in place.

    Attributes
    ----------
    token_bytes
        Of one token of a sequence, all layers.
    """

    token_bytes: int

    def write(
        self, layer: int, row: int, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write (kv_heads, tokens, head_dim) from a token on."""
        ...

    def attend(
        self, layer: int, row: int, length: int, query: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend to the first tokens; (query_heads, 1, head_dim) in and out."""
        ...


class PlanarCache:
    """A `MemoryCache` of one array of keys and one of values, (…, kv_heads, tokens, head_dim).

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    kind
        Type of the arrays.
    kernel
        Attends.
    meter
        Counts the arrays.
    """

    def __init__(self, setup: RivalSetup, kind: torch.dtype, kernel: Kernel, meter: Meter) -> None:
        shape = setup.shape
        size = (shape.layers, setup.batch, shape.kv_heads, setup.context, shape.head_dim)
        self.kind, self._kernel = kind, kernel
        self.token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * kind.itemsize
        self.keys, self.values = meter.tensor(size, kind), meter.tensor(size, kind)

    def write(
        self, layer: int, row: int, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write in place; see `MemoryCache`."""
        new = slice(first, first + keys.shape[1])
        self.keys[layer, row, :, new] = keys
        self.values[layer, row, :, new] = values

    def attend(
        self, layer: int, row: int, length: int, query: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend with the kernel; see `MemoryCache`."""
        keys, values = (part[layer, row, :, :length] for part in (self.keys, self.values))
        return self._kernel(query.to(self.kind), keys, values, scaling).to(query.dtype)


class RowCache:
    """A `MemoryCache` of rows in the stored type, for the native kernel.

    Parameters
    ----------
    setup
        Says how many layers, sequences and tokens.
    layout
        Packs rows.
    attention
        Attends.
    meter
        Counts the rows.
    """

    def __init__(
        self, setup: RivalSetup, layout: RowLayout, attention: BlockAttention, meter: Meter
    ) -> None:
        shape = setup.shape
        self._layout, self._attention = layout, attention
        self.token_bytes = shape.token_bytes
        size = (shape.layers, setup.batch, setup.context, shape.row_bytes)
        self.rows = meter.buffer(int(np.prod(size))).reshape(size)

    def write(
        self, layer: int, row: int, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Pack in place; see `MemoryCache`."""
        self._layout.pack(keys, values, self.rows[layer, row, first : first + keys.shape[1]])

    def attend(
        self, layer: int, row: int, length: int, query: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend natively; see `MemoryCache`."""
        return self._attention.attend(query, [[whole(self.rows[layer, row, :length])]], scaling)


def _sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], scale=scaling, enable_gqa=True
    )[0]


def _eager(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
    scores = torch.matmul(grouped * scaling, keys.transpose(-1, -2))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values).reshape(query.shape)


def _packed(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    return attend_block(query, keys, values, scaling)[0].to(query.dtype)


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"sdpa": _sdpa, "eager": _eager, "packed": _packed}
)
