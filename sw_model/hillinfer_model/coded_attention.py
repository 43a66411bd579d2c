# SPDX-License-Identifier: Apache-2.0
"""Attention with one softmax over rows and coded tokens, defined to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.floats import Floats, fused_multiply_add, inner_products
from hillinfer_model.integers import Integers, clamp
from hillinfer_model.key_codes import KeyCodes

BLOCK_TOKENS = 64
FRACTION_BITS = 16
# Weights are cut below 2^-40 of a block's largest power of two, and blocks of the largest block's.
LEAST_POWER = -40
ALIGNED_LIMIT = 2**23 - 1
PRODUCT_LIMIT = 32767.0
ADDEND_BITS = 15
# 2^23 · 2^(h/256), so that a weight has 24 bits.
POWERS: Integers = np.rint(np.ldexp(np.exp2(np.arange(257) / 256), 23)).astype(np.int64)


@dataclass(frozen=True)
class ExactRows:
    """Rows of a layer's exact tokens, in ascending positions.

    Parameters
    ----------
    keys, values
        float32 of shape (tokens, kv_heads, head_dim): what the stored rows hold.
    """

    keys: Floats
    values: Floats


@dataclass(frozen=True)
class CodedTokens:
    """Coded tokens of one segment, in ascending positions.

    Parameters
    ----------
    aligned
        L', int64 of shape (query_heads, tokens) (contract, section 5).
    invalid_keys
        bool of shape (tokens, kv_heads).
    values
        Their value codes.
    statistics
        Of the segment's values.
    """

    aligned: Integers
    invalid_keys: NDArray[np.bool_]
    values: KeyCodes
    statistics: ChannelStatistics


@dataclass(frozen=True)
class PartialSoftmax:
    """Softmax over one block, relative to a power of two (contract, section 16).

    Parameters
    ----------
    powers
        R, int64 of shape (heads,): weights are relative to 2^R.
    totals
        Sums of weights in units of 2^-40, int64 of shape (heads,).
    outputs
        Sums of weighted values, float32 of shape (heads, head_dim).
    broken
        bool of shape (heads,): whether a token has no weight that could be told.
    """

    powers: Integers
    totals: Integers
    outputs: Floats
    broken: NDArray[np.bool_]


def attend(scaled: Floats, rows: ExactRows, coded: Sequence[CodedTokens]) -> Floats:
    """Attend to exact and coded tokens of one layer (contract, section 16).

    Where each KV head has sets of its own, each is given by itself.

    Parameters
    ----------
    scaled
        q', float32 of shape (query_heads, head_dim) (contract, section 4); not the sum of
        `raw_sum`.
    rows
        The exact tokens.
    coded
        The coded tokens, segment by segment, ascending.

    Returns
    -------
    float32 of shape (query_heads, head_dim); NaN where a token's key, or a coded value, is none.

    Raises
    ------
    ValueError
        Where there is no token, or query heads do not fit the KV heads.
    """
    heads, kv_heads = scaled.shape[0], rows.keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    group = heads // kv_heads
    columns = []
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        blocks = list(_exact_blocks(scaled[own], rows, head))
        for segment in coded:
            blocks += _coded_blocks(segment, own, head)
        if not blocks:
            raise ValueError("attention needs a token: both sets are empty")
        columns.append(merge(blocks))
    return np.concatenate(columns)


def merge(blocks: Sequence[PartialSoftmax]) -> Floats:
    """Return the outputs of blocks that are added in the order given (contract, section 16)."""
    powers = np.max([block.powers for block in blocks], axis=0)
    totals = np.zeros_like(powers)
    outputs = np.zeros_like(blocks[0].outputs)
    broken = np.asarray(np.stack([block.broken for block in blocks]).any(axis=0))
    for block in blocks:
        below = powers - block.powers
        counts = below <= -LEAST_POWER
        near = np.minimum(below, -LEAST_POWER)
        totals = totals + np.where(counts, block.totals >> near, 0)
        moved = _times_power(block.outputs, -near[:, np.newaxis])
        outputs = np.where(counts[:, np.newaxis], outputs + moved, outputs)
    quotients = outputs / _unit_totals(totals)[:, np.newaxis]
    return np.where(broken[:, np.newaxis], np.float32(np.nan), quotients).astype(np.float32)


def exact_block(products: Floats, values: Floats) -> PartialSoftmax:
    """Return the softmax over a block of rows (contract, section 16).

    Parameters
    ----------
    products
        Inner products in log2 units, float32 of shape (heads, tokens).
    values
        float32 of shape (tokens, head_dim).
    """
    lost = np.isnan(products)
    limited = np.clip(np.where(lost, np.float32(0), products), -PRODUCT_LIMIT, PRODUCT_LIMIT)
    fixed = np.rint(np.ldexp(limited, FRACTION_BITS)).astype(np.int64)
    reference, power, mantissa = _weights(fixed)
    weights = np.where(power < LEAST_POWER, 0, mantissa).astype(np.float32)
    weights = _times_power(weights, np.maximum(power, LEAST_POWER) - 23)
    outputs = np.zeros((products.shape[0], values.shape[1]), dtype=np.float32)
    for token in range(values.shape[0]):
        outputs = fused_multiply_add(weights[:, token, np.newaxis], values[token], outputs)
    return PartialSoftmax(
        reference, _totals(power, mantissa), outputs, np.asarray(lost.any(axis=1))
    )


def coded_block(
    aligned: Integers, values: KeyCodes, statistics: ChannelStatistics
) -> PartialSoftmax:
    """Return the softmax over a block of coded tokens of one segment (contract, section 16).

    Parameters
    ----------
    aligned
        L', int64 of shape (heads, tokens), at most 64 tokens.
    values
        Their value codes in one KV head.
    statistics
        Of the segment's values in this KV head.
    """
    fixed = clamp(aligned, ALIGNED_LIMIT) << (FRACTION_BITS - 8)
    reference, power, mantissa = _weights(fixed)
    # p = w · 2^t is mantissa · 2^(place - 23); what is invalid only has to stay in range.
    place = power + np.where(values.invalid, 0, values.exponents)[:, 0].astype(np.int64)
    live = power >= LEAST_POWER
    top = np.where(live, place, LEAST_POWER).max(axis=1) + 1
    shift = np.where(live, top[:, np.newaxis] - place + 23 - ADDEND_BITS, 62)
    # Beyond 62 bits every addend is 0 as it is there.
    shift = np.minimum(shift, 62)
    addends = (mantissa + (np.int64(1) << (shift - 1))) >> shift
    # No weight has bits behind its table's step, so addends stay below 32,680, and every partial
    # sum is an integer below 2^24: any order, and float32, give the same bits.
    sums = (addends @ values.codes[:, 0].astype(np.int64)).astype(np.float32)
    distances = _times_power(sums, top[:, np.newaxis] - ADDEND_BITS)
    totals = _totals(power, mantissa)
    units = fused_multiply_add(
        _unit_totals(totals)[:, np.newaxis], statistics.means[0].astype(np.float32), distances
    )
    outputs = _times_power(units, statistics.exponents[0].astype(np.int64) - 14)
    broken = np.full(len(totals), bool(values.invalid.any()))
    return PartialSoftmax(reference, totals, outputs, broken)


def _exact_blocks(scaled: Floats, rows: ExactRows, head: int) -> Iterator[PartialSoftmax]:
    products = inner_products(scaled, rows.keys[:, head])
    for first in range(0, products.shape[1], BLOCK_TOKENS):
        part = slice(first, first + BLOCK_TOKENS)
        yield exact_block(products[:, part], rows.values[part, head])


def _coded_blocks(segment: CodedTokens, heads: slice, head: int) -> Iterator[PartialSoftmax]:
    head_only = slice(head, head + 1)
    statistics = ChannelStatistics(
        segment.statistics.exponents[head_only], segment.statistics.means[head_only]
    )
    for first in range(0, segment.aligned.shape[1], BLOCK_TOKENS):
        own = slice(first, first + BLOCK_TOKENS)
        values = KeyCodes(
            segment.values.codes[own, head_only], segment.values.exponents[own, head_only]
        )
        block = coded_block(segment.aligned[heads, own], values, statistics)
        no_key = bool(segment.invalid_keys[own, head].any())
        yield replace(block, broken=block.broken | no_key)


def _weights(fixed: Integers) -> tuple[Integers, Integers, Integers]:
    """Return R, I and P: weights relative to 2^R are P · 2^(I-23), of (heads, tokens)."""
    reference = -(-fixed.max(axis=1) >> FRACTION_BITS)
    relative = fixed - (reference << FRACTION_BITS)[:, np.newaxis]
    place, rest = (relative >> 8) & 255, relative & 255
    steps = POWERS[place + 1] - POWERS[place]
    mantissa = POWERS[place] + ((steps * rest + 128) >> 8)
    return reference, relative >> FRACTION_BITS, mantissa


def _totals(power: Integers, mantissa: Integers) -> Integers:
    """Return the sums of weights in units of 2^-40, int64 of shape (heads,)."""
    near = np.maximum(power, LEAST_POWER)
    terms = np.where(power < LEAST_POWER, 0, (mantissa << 17) >> -near)
    return np.asarray(terms.sum(axis=1))


def _unit_totals(totals: Integers) -> Floats:
    return _times_power(totals.astype(np.float32), np.int64(-40))


def _times_power(values: Floats, power: Integers | np.int64) -> Floats:
    """Return values · 2^power, exact where it is not subnormal."""
    return np.ldexp(values, np.asarray(power).astype(np.int32))
