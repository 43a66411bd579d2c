# SPDX-License-Identifier: Apache-2.0
"""Layers of exact rows and coded tokens, for the golden model and for native attention."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from native_cases import Rows, require_variant, shape_of

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import NativeError, Variant, native_library
from hillinfer_bench.precision.coded_attention import CodedAttention, CodedSegment, CodePlaces
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.coded_attention import CodedTokens, ExactRows, PartialSoftmax, coded_block
from hillinfer_model.floats import inner_products
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.value_layout import (
    code_row_bytes,
    value_dim,
    value_segment_beats,
    write_values,
)

SEGMENT = 1024


def coded_attention(variant, shape):
    """Attention with one variant, or a skip that says what is missing."""
    require_variant(variant)
    return CodedAttention(shape, variant)


def _variants():
    try:
        return native_library().variants
    except NativeError:
        # Each test says why.
        return tuple(Variant)


# Which ones it lacks test_native_attention.py says.
every_variant = pytest.mark.parametrize("variant", _variants())


@dataclass
class Segment:
    """Random coded tokens of a segment, with what native attention reads."""

    shape: ModelShape
    codes: KeyCodes
    aligned: np.ndarray
    invalid_keys: np.ndarray
    statistics: ChannelStatistics
    tokens: np.ndarray

    @property
    def spec(self):
        return KernelSpec(
            self.shape.head_dim, self.shape.kv_heads, self.shape.group_size, segment_tokens=SEGMENT
        )

    def golden(self):
        return CodedTokens(
            self.aligned.astype(np.int64), self.invalid_keys, self.codes, self.statistics
        )

    def in_shadow(self):
        """The tokens at their places in a whole segment's value shadow."""
        whole = KeyCodes(
            np.zeros((SEGMENT, *self.codes.codes.shape[1:]), np.int8),
            np.zeros((SEGMENT, self.shape.kv_heads), np.uint8),
        )
        whole.codes[self.tokens] = self.codes.codes
        whole.exponents[self.tokens] = self.codes.exponents
        shadow = np.zeros((value_segment_beats(self.spec), 64), np.uint8)
        write_values(shadow, 0, whole, self.spec)
        return self._native(CodePlaces.in_shadow(shadow, self.tokens, self.spec))

    def in_rows(self):
        """Each token by itself, in any order, with rows that are no tokens between them."""
        count, kv_heads, dim = self.codes.codes.shape
        half = code_row_bytes(self.spec)
        memory = np.full((2 * count + 1, half + kv_heads + 3), 0xA5, np.uint8)
        rows = np.random.default_rng(count).permutation(2 * count + 1)[:count]
        padded = np.zeros((count, kv_heads, value_dim(self.spec)), np.int8)
        padded[:, :, :dim] = self.codes.codes
        blocks = padded.reshape(count, half // 16, 2, 16).view(np.uint8)
        memory[rows, :half] = (blocks[:, :, 0] & 15 | blocks[:, :, 1] << 4).reshape(count, half)
        memory[rows, half : half + kv_heads] = self.codes.exponents
        return self._native(CodePlaces.in_rows(memory, rows, self.spec))

    def _native(self, places):
        return CodedSegment(
            self.aligned, np.ascontiguousarray(self.invalid_keys.T), places, self.statistics
        )


def coded_segment(shape, count, seed=0, exponents=(4, 13), spread=6.0):
    """Random tokens; L' spreads over so many powers of two, with some far below them."""
    generator = np.random.default_rng([seed, count])
    kv_heads, dim = shape.kv_heads, shape.head_dim
    aligned = generator.normal(0, spread * 256, (shape.query_heads, count)).astype(np.int32)
    aligned[generator.random(aligned.shape) < 0.1] -= 50 * 256
    return Segment(
        shape,
        KeyCodes(
            generator.integers(-7, 8, (count, kv_heads, dim), dtype=np.int8),
            generator.integers(*exponents, (count, kv_heads), dtype=np.uint8),
        ),
        aligned,
        np.zeros((count, kv_heads), np.bool_),
        ChannelStatistics(
            generator.integers(-6, 6, (kv_heads, dim), dtype=np.int8),
            generator.integers(-(2**17), 2**17, (kv_heads, dim), dtype=np.int32),
        ),
        np.sort(generator.permutation(SEGMENT)[:count]),
    )


class Layer:
    """A query, exact rows and coded segments of one layer."""

    def __init__(self, shape, exact, coded, seed=0, **kinds):
        self.shape = shape
        self.rows = Rows(shape, exact, seed)
        self.scaled = self.rows.query.numpy() * np.float32(0.4)
        self.segments = [
            coded_segment(shape, count, seed + number, **kinds)
            for number, count in enumerate(coded)
        ]

    def golden_rows(self):
        keys, values = (
            one.to(torch.float32).numpy().transpose(1, 0, 2).copy()
            for one in (self.rows.keys, self.rows.values)
        )
        return ExactRows(keys, values)

    def native_segments(self):
        """By turns in shadows and in rows."""
        return [
            one.in_rows() if number % 2 else one.in_shadow()
            for number, one in enumerate(self.segments)
        ]


def golden_products(layer, head):
    group = layer.shape.group_size
    own = layer.scaled[head * group : (head + 1) * group]
    return inner_products(own, layer.golden_rows().keys[:, head])


def golden_coded_block(segment, head, first):
    """The golden model's block of a segment in one KV head."""
    group, own = segment.shape.group_size, slice(first, first + 64)
    golden = segment.golden()
    only = slice(head, head + 1)
    codes = KeyCodes(golden.values.codes[own, only], golden.values.exponents[own, only])
    statistics = ChannelStatistics(golden.statistics.exponents[only], golden.statistics.means[only])
    aligned = golden.aligned[head * group : (head + 1) * group, own]
    with np.errstate(over="ignore"):
        block = coded_block(aligned, codes, statistics)
    no_key = bool(golden.invalid_keys[own, head].any())
    return replace(block, broken=block.broken | no_key)


def one_nan(array):
    """The same with numpy's NaN for each NaN: instruction sets differ in their bits."""
    return np.where(np.isnan(array), np.float32(np.nan), array)


def same_bits(found, expected):
    """Whether floats have the same bits, and any NaN where there is one."""
    return np.array_equal(one_nan(found).view(np.int32), one_nan(expected).view(np.int32))


def same_block(found, block, head, expected: PartialSoftmax):
    """Whether a native block has the bits of a golden one of a KV head."""
    group = expected.powers.shape[0]
    own = slice(head * group, (head + 1) * group)
    return (
        np.array_equal(found.powers[block, own], expected.powers)
        and np.array_equal(found.totals[block, own], expected.totals)
        and np.array_equal(found.broken[block, own], expected.broken)
        and same_bits(found.outputs[block, own], expected.outputs)
    )


SHAPES = [
    shape_of(kv_heads, group, dim, stored)
    for (kv_heads, group, dim), stored in zip(
        [(1, 1, 64), (3, 3, 64), (2, 4, 128), (1, 7, 80), (2, 2, 96), (1, 8, 256), (2, 5, 48)],
        [StoredType.FLOAT16, StoredType.BFLOAT16] * 4,
        strict=False,
    )
]


def name_of(shape):
    kind = "bf16" if shape.stored_type is StoredType.BFLOAT16 else "fp16"
    return f"{shape.kv_heads}x{shape.group_size}x{shape.head_dim}-{kind}"


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=name_of)
