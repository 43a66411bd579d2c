# SPDX-License-Identifier: Apache-2.0
"""The whole KV cache in memory, attended to by the fastest of several kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import ClassVar

import torch

from hillinfer.attention.host_attention import host_attention
from hillinfer.machine.memory import MemoryFacts
from hillinfer_bench.rivals.block_attention import BlockAttention
from hillinfer_bench.rivals.memory_caches import KERNELS, MemoryCache, PlanarCache, RowCache
from hillinfer_bench.rivals.meter import Meter
from hillinfer_bench.rivals.rival import Rival
from hillinfer_bench.rivals.setup import RivalSetup

Maker = Callable[[RivalSetup, Meter], MemoryCache]
# Bytes of the layers that are taken in turns, more than caches hold.
_ROTATED_BYTES, _TRIALS = 256 << 20, 5


class FullMemory(Rival):
    """Preallocated keys and values of every layer, written in place; M0 does not bound it.

    Kernel and form of the cache (torch's kernels over the stored type or the same values widened
    to float32, or the native kernel over rows) are chosen by timing each on random keys.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    bounded: ClassVar[bool] = False

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        makers = self._makers()
        self._chosen = self._fastest(makers)
        self.cache: MemoryCache | None = makers[self._chosen](setup, self.meter)

    def attended_token_bytes(self) -> float:
        """Return those of the form that won the trial; see `Rival`."""
        assert self.cache is not None
        return float(self.cache.token_bytes)

    def describe(self) -> str:
        """Return the kernel and type that won the trial."""
        return self._chosen

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write them in place; see `Rival`."""
        start = self.grow(layer, row, keys, values)
        assert self.cache is not None
        self.cache.write(layer, row, start, keys, values)

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one in place; see `Rival`."""
        self.fill(layer, row, keys, values)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        assert self.cache is not None
        return self.cache.attend(layer, row, self.lengths[layer][row], query, scaling)

    def close(self) -> None:
        """Give the memory back."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self.cache = None

    def _makers(self) -> dict[str, Maker]:
        """Return what can be tried: float32 only where half the free memory has room for it."""
        setup, layout = self.setup, self.layout
        kinds = [layout.stored_type]
        wide = 4 * 2 * setup.units * setup.shape.kv_heads * setup.context * setup.shape.head_dim
        if 2 * wide <= MemoryFacts.read().available_bytes:
            kinds.append(torch.float32)
        makers: dict[str, Maker] = {}
        for kind in kinds:
            for name in KERNELS:
                makers[f"{name} over {str(kind).removeprefix('torch.')}"] = partial(
                    _planar, kind, name
                )
        if host_attention(setup.shape) is not None:
            attention = BlockAttention(setup.shape, layout, setup.block_rows)
            makers["native over rows"] = lambda setup, meter: RowCache(
                setup, layout, attention, meter
            )
        return makers

    def _fastest(self, makers: dict[str, Maker]) -> str:
        shape = self.setup.shape
        layer_bytes = self.setup.context * shape.row_bytes
        layers = min(shape.layers, -(-_ROTATED_BYTES // layer_bytes))
        small = replace(
            self.setup,
            shape=replace(shape, layers=layers),
            batch=1,
        )
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(shape.query_heads, 1, shape.head_dim, generator=generator)
        query = query.to(self.layout.stored_type)
        size = (shape.kv_heads, small.context, shape.head_dim)
        keys = torch.randn(size, generator=generator).to(self.layout.stored_type)
        timed = {}
        for name, maker in makers.items():
            cache = maker(small, Meter(None))
            for layer in range(layers):
                cache.write(layer, 0, 0, keys, keys)
            timed[name] = _least_seconds(_turns(cache, layers, small.context, query))
            # The next form's arrays need the room.
            del cache
        return min(timed, key=lambda name: timed[name])


def _turns(
    cache: MemoryCache, layers: int, tokens: int, query: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return what attends to another layer at each call, so that none stays in a cache."""
    turn = cycle(range(layers))
    return lambda: cache.attend(next(turn), 0, tokens, query, 1.0)


def _planar(kind: torch.dtype, kernel: str, setup: RivalSetup, meter: Meter) -> MemoryCache:
    return PlanarCache(setup, kind, KERNELS[kernel], meter)


def _least_seconds(attend: Callable[[], torch.Tensor]) -> float:
    least = float("inf")
    for _ in range(_TRIALS):
        started = time.perf_counter()
        attend()
        least = min(least, time.perf_counter() - started)
    return least
