# SPDX-License-Identifier: Apache-2.0
"""Inputs that several golden tests share."""

import numpy as np

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.key_codes import KeyCodes


def random_keys(seed, tokens, kv_heads, head_dim):
    """FP16 codes of keys with unlike channels: large means, small and large spreads."""
    generator = np.random.default_rng(seed)
    shape = (kv_heads, head_dim)
    spread = np.exp2(generator.integers(-6, 5, shape))
    mean = generator.normal(0, 8, shape) * (generator.random(shape) < 0.3)
    values = generator.normal(0, 1, (tokens, *shape)) * spread + mean
    return values.astype(np.float16).view(np.uint16)


def random_query(seed, heads, head_dim):
    return np.random.default_rng(seed).normal(0, 2, (heads, head_dim)).astype(np.float32)


def statistics_of(exponents, means):
    return ChannelStatistics(
        np.atleast_2d(np.asarray(exponents, dtype=np.int8)),
        np.atleast_2d(np.asarray(means, dtype=np.int32)),
    )


def random_codes(seed, tokens, spec):
    """Any codes the key mode can hold, with every kind of exponent."""
    generator = np.random.default_rng(seed)
    low, high = {8: (-127, 128), 4: (-7, 8), 2: (-2, 2)}[spec.key_mode.code_bits]
    shape = (tokens, spec.kv_heads, spec.head_dim)
    return KeyCodes(
        generator.integers(low, high, shape, dtype=np.int8),
        generator.integers(0, 256, shape[:2], dtype=np.uint8),
    )


def bit_flipped(array, index, bit):
    """A copy of an integer array with one bit of one element flipped."""
    copy = np.ascontiguousarray(array).copy()
    raw = copy.view(f"u{copy.dtype.itemsize}")
    raw[index] ^= raw.dtype.type(1 << bit)
    return copy


def same_codes(one, other):
    return np.array_equal(one.codes, other.codes) and np.array_equal(one.exponents, other.exponents)


def same_statistics(one, other):
    return np.array_equal(one.exponents, other.exponents) and np.array_equal(one.means, other.means)
