# SPDX-License-Identifier: Apache-2.0
"""Rows at scattered addresses, and native attention over them for each instruction set."""

import numpy as np
import pytest
import torch
from exact_attention import exact_attention

from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import NativeError, Variant, native_library
from hillinfer.native.structures import row_addresses
from hillinfer_bench.precision.in_place_attention import InPlaceAttention

every_variant = pytest.mark.parametrize("variant", Variant)
every_type = pytest.mark.parametrize("stored_type", StoredType)


def require_variant(variant):
    """Skip, and say what is missing, where this machine cannot run a variant."""
    try:
        library = native_library()
    except NativeError as error:
        pytest.skip(str(error))
    if variant not in library.variants:
        pytest.skip(f"this processor has no {variant.value}")


def native_attention(variant, shape):
    """Attention with one variant, or a skip that says what is missing."""
    require_variant(variant)
    return InPlaceAttention(shape, variant)


def shape_of(kv_heads, group_size, head_dim, stored_type=StoredType.BFLOAT16):
    return ModelShape(1, kv_heads, kv_heads * group_size, head_dim, stored_type, 1 << 20)


class Rows:
    """Random rows in a memory with room for more, in any order."""

    def __init__(self, shape, count, seed=0, keys=None, values=None):
        generator = torch.Generator().manual_seed(seed)
        layout, self.shape = RowLayout(shape), shape
        states = (shape.kv_heads, count, shape.head_dim)
        keys = torch.randn(states, generator=generator) * 1.5 if keys is None else keys
        values = torch.randn(states, generator=generator) if values is None else values
        self.keys, self.values = (one.to(layout.stored_type) for one in (keys, values))
        self.query = torch.randn((shape.query_heads, shape.head_dim), generator=generator)
        self.scaling = shape.head_dim**-0.5
        self.places = np.random.default_rng(seed).permutation(2 * count + 1)[:count]
        self.memory = np.full((2 * count + 1, shape.row_bytes), 0xFF, np.uint8)
        packed = np.empty((count, shape.row_bytes), np.uint8)
        layout.pack(self.keys, self.values, packed)
        self.memory[self.places] = packed

    @property
    def addresses(self):
        return row_addresses(self.memory, self.places)

    def exact(self):
        """The output in float64."""
        return exact_attention(self.query[:, None], self.keys, self.values, self.scaling)[0][:, 0]


def tell(selected, sets):
    """Give the library's memory of selected sets those of a test."""
    selected.table.set_rows = len(sets[0])
    selected.sets[: len(sets) * len(sets[0])] = np.concatenate(sets)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def flip_bit(rows, row, byte, bit):
    rows.memory[rows.places[row], byte] ^= 1 << bit
