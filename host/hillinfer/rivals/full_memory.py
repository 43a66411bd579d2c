# SPDX-License-Identifier: Apache-2.0
"""The whole KV cache in memory, attended to by the fastest of several kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch

from hillinfer.attention.kernels import attend_block
from hillinfer.machine.memory import MemoryFacts
from hillinfer.rivals.rival import Rival
from hillinfer.rivals.setup import RivalSetup

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_TRIAL_TOKENS, _TRIALS = 4096, 5


class FullMemory(Rival):
    """Preallocated keys and values of every layer, written in place; M0 does not bound it.

    Kernel and type of the cache (the stored type, or the same values widened to float32) are
    chosen by timing each on random keys.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    bounded: ClassVar[bool] = False

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        shape = setup.shape
        self.kernel, self.cache_type = self._fastest()
        size = (shape.layers, setup.batch, shape.kv_heads, setup.context, shape.head_dim)
        self._keys = self.meter.tensor(size, self.cache_type)
        self._values = self.meter.tensor(size, self.cache_type)

    def describe(self) -> str:
        """Return the kernel and type that won the trial."""
        return f"{self.kernel} over {str(self.cache_type).removeprefix('torch.')}"

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write them in place; see `Rival`."""
        start = self.grow(layer, row, keys, values)
        new = slice(start, start + keys.shape[1])
        self._keys[layer, row, :, new] = keys
        self._values[layer, row, :, new] = values

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one in place; see `Rival`."""
        self.fill(layer, row, keys, values)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        length = self.lengths[layer][row]
        keys, values = (part[layer, row, :, :length] for part in (self._keys, self._values))
        attended = KERNELS[self.kernel](query.to(self.cache_type), keys, values, scaling)
        return attended.to(query.dtype)

    def close(self) -> None:
        """Give the memory back."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self._keys = self._values = torch.empty(0)

    def _fastest(self) -> tuple[str, torch.dtype]:
        shape = self.setup.shape
        tokens = min(self.setup.context, _TRIAL_TOKENS)
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(shape.query_heads, 1, shape.head_dim, generator=generator)
        keys = torch.randn(shape.kv_heads, tokens, shape.head_dim, generator=generator)
        timed = {}
        for kind in self._types():
            given = query.to(kind), keys.to(kind), keys.to(kind)
            for name, kernel in KERNELS.items():
                timed[name, kind] = _least_seconds(kernel, *given)
        return min(timed, key=lambda one: timed[one])

    def _types(self) -> list[torch.dtype]:
        """Return the types the cache may have: float32 only where half the free memory has it."""
        stored = self.layout.stored_type
        setup = self.setup
        wide = 4 * 2 * setup.units * setup.shape.kv_heads * setup.context * setup.shape.head_dim
        return [stored, *([torch.float32] * (2 * wide <= MemoryFacts.read().available_bytes))]


def _least_seconds(
    kernel: Kernel, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> float:
    least = float("inf")
    for _ in range(_TRIALS):
        started = time.perf_counter()
        kernel(query, keys, values, 1.0)
        least = min(least, time.perf_counter() - started)
    return least


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
