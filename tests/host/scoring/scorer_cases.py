# SPDX-License-Identifier: Apache-2.0
"""Inputs and comparisons that the tests of the torch scorer share."""

import numpy as np
import torch

from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.channel_statistics import ChannelStatistics


def plain_keys(seed, tokens, kv_heads, head_dim):
    """Keys with unlike channels: large means, small and large spreads."""
    generator = np.random.default_rng(seed)
    shape = (kv_heads, head_dim)
    spread = np.exp2(generator.integers(-7, 6, shape))
    mean = generator.normal(0, 10, shape) * (generator.random(shape) < 0.4)
    values = generator.normal(0, 1, (tokens, *shape)) * spread + mean
    return torch.from_numpy(values.astype(np.float16))


def any_keys(seed, tokens, kv_heads, head_dim):
    """Every kind of FP16 code: NaN in most tokens, infinities, subnormals, both zeros."""
    codes = np.random.default_rng(seed).integers(
        0, 65_536, (tokens, kv_heads, head_dim), dtype=np.uint16
    )
    return torch.from_numpy(codes.view(np.float16))


def rare_keys(seed, tokens, kv_heads, head_dim):
    """Plain keys, a few of them NaN, subnormal, zero or larger than the others, none infinite.

    An infinite key's weight would leave nothing of the other tokens' scores.
    """
    generator = np.random.default_rng(seed)
    keys = plain_keys(seed, tokens, kv_heads, head_dim).numpy().view(np.uint16).copy()
    hit = generator.random(keys.shape) < 1 / (8 * head_dim)
    rare = generator.choice([0, 0x8000, 1, 0x83FF, 0x7E01, 0xFC01, 0x5000, 0xD3FF], hit.shape)
    keys[hit] = rare[hit]
    return torch.from_numpy(keys.view(np.float16))


def tied_keys(seed, tokens, kv_heads, head_dim):
    """Small integers times a power of two per channel, so that roundings meet halves."""
    generator = np.random.default_rng(seed)
    scale = np.exp2(generator.integers(-18, 9, (kv_heads, head_dim)))
    values = generator.integers(-4, 5, (tokens, kv_heads, head_dim)) * scale
    return torch.from_numpy(values.astype(np.float16))


KEY_KINDS = {"plain": plain_keys, "any": any_keys, "rare": rare_keys, "tied": tied_keys}


def plain_query(seed, spec, scale=1.0):
    values = np.random.default_rng(seed).normal(0, scale, (spec.query_heads, spec.head_dim))
    return torch.from_numpy(values.astype(np.float32))


def any_statistics(seed, kv_heads, head_dim):
    """Statistics anywhere in their ranges, the ends among them."""
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-14, 17, (kv_heads, head_dim), dtype=np.int8)
    means = generator.integers(1 - 2**23, 2**23, (kv_heads, head_dim), dtype=np.int32)
    means.flat[:2] = (2**23 - 1, 1 - 2**23)[: means.size]
    exponents.flat[:2] = (16, -14)[: means.size]
    return ChannelStatistics(exponents, means)


def segments_of(scorer, keys):
    """Code a sequence, a whole segment at once."""
    length = scorer.spec.segment_tokens
    segments = []
    statistics = None
    for base in range(0, keys.shape[0], length):
        own = keys[base : base + length]
        statistics = scorer.statistics(own, base, statistics)
        shadow = np.zeros((scorer.spec.segment_beats, 64), dtype=np.uint8)
        scorer.encode(own, statistics, shadow, 0)
        segments.append(SegmentShadow(base, own.shape[0], shadow, statistics))
    return segments


def assert_same_statistics(one, other):
    assert np.array_equal(one.exponents, other.exponents)
    assert np.array_equal(one.means, other.means)


def assert_same_segments(one, other):
    assert len(one) == len(other)
    for mine, golden in zip(one, other, strict=True):
        assert (mine.base_position, mine.tokens) == (golden.base_position, golden.tokens)
        assert_same_statistics(mine.statistics, golden.statistics)
        assert np.array_equal(mine.shadow, golden.shadow)


def assert_same_tuples(one, other):
    assert one.dtype == other.dtype == np.uint32
    np.testing.assert_array_equal(one, other)


def flip_bit(array, seed):
    """Flip one bit of an integer array in place, anywhere."""
    generator = np.random.default_rng(seed)
    raw = array.reshape(-1).view(np.uint8)
    raw[generator.integers(raw.size)] ^= np.uint8(1 << generator.integers(8))
