# SPDX-License-Identifier: Apache-2.0
"""Rivals that attend to everything: in memory, on the drive, and swapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import attend_block, host_attention
from hillinfer.errors import SettingsError
from hillinfer.kv.sequence import RowLayout
from hillinfer.system.machine import MemoryFacts
from hillinfer_bench.rivals.block_attention import BlockAttention, Part, whole
from hillinfer_bench.rivals.drive_rows import BlockStream, DriveRival
from hillinfer_bench.rivals.rival import Meter, Rival, RivalSetup, Traffic
from hillinfer_model.kernel_spec import GROUP_TOKENS

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
    time_of
        Returns the seconds that attending once takes, given what does it.

    Attributes
    ----------
    forms
        What can be chosen, in the order of the trial.
    """

    bounded: ClassVar[bool] = False

    def __init__(
        self,
        setup: RivalSetup,
        time_of: Callable[[Callable[[], torch.Tensor]], float] | None = None,
    ) -> None:
        super().__init__(setup)
        self._time_of = time_of or _least_seconds
        makers = self._makers()
        if setup.form not in (None, *makers):
            raise SettingsError(f"form={setup.form!r}: choose one of {', '.join(makers)}")
        self.forms = tuple(makers)
        self._chosen = setup.form or self._fastest(makers)
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
            timed[name] = self._time_of(_turns(cache, layers, small.context, query))
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


class FullDrive(DriveRival):
    """A fixed share of each layer's KV in DRAM, the rest streamed (after FlexGen).

    The first tokens are the share. The rest is read in large blocks ahead of attention.

    Parameters
    ----------
    setup
        See `Rival`.
    """

    def prepare(self) -> None:
        """Take the stream's buffers, and the share with what is left; see `DriveRival`."""
        setup = self.setup
        self.rows = self.open_rows(self.row_bytes, "rows")
        self.stream = BlockStream(setup, self.rows, self.spilled, self.meter)
        most = self.rows.region_rows // GROUP_TOKENS
        group_bytes = GROUP_TOKENS * self.row_bytes
        held = min(most, self.meter.free_bytes // (setup.units * group_bytes))
        self.stream.first_token = self.held_tokens = held * GROUP_TOKENS
        size = setup.units * self.held_tokens * self.row_bytes
        self._held = self.meter.buffer(size).reshape(
            setup.shape.layers, setup.batch, self.held_tokens, self.row_bytes
        )

    def attended_token_bytes(self) -> float:
        """Return those of whole rows; see `Rival`."""
        return float(self.setup.shape.token_bytes)

    def describe(self) -> str:
        """Return the share in DRAM and the size of a block."""
        return f"{self.held_tokens} tokens in DRAM, blocks of {self.stream.block_tokens}"

    def spill(self, layer: int, row: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Keep a group of the share, write any other; see `DriveRival`."""
        if first < self.held_tokens:
            self._held[layer, row, first : first + len(rows)] = rows
        else:
            self.rows.write(layer, row, first, rows)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        return self.attention.attend(query, self._batches(layer, row), scaling)

    def traffic(self) -> Traffic:
        """Return the totals, a block being read ahead included; see `Rival`."""
        self.stream.wait()
        return super().traffic()

    def close(self) -> None:
        """Wait for what is being read and give everything back; see `Rival`."""
        self.stream.close()
        super().close()
        self._held = np.empty((0, 0, 0, 0), np.uint8)

    def _batches(self, layer: int, row: int) -> Iterator[list[Part]]:
        held = min(self.spilled[layer][row], self.held_tokens)
        yield [whole(self._held[layer, row, :held])]
        for rows in self.stream.blocks(layer, row):
            yield [whole(rows)]
        yield [whole(self.tail(layer, row))]
