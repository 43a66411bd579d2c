# SPDX-License-Identifier: Apache-2.0
"""The oracle's value codes and attention over rows and codes (page, sections 14 to 16)."""

from fractions import Fraction
from functools import cache
from math import ceil, floor

from oracle_numbers import (
    clamp,
    floor_log2,
    power,
    round_half_even,
    round_half_up,
    to_float32,
    to_float64,
)


def decoded(code, t, exponent, mean):
    """Return what a value's code stands for."""
    return (code * 2**t + mean) * power(exponent - 14)


# Layout


def padded_dim(d):
    while d % 32 or d < 64:
        d += 1
    return d


def group_beats(kv, d):
    return kv * (1 + padded_dim(d) // 2)


def exponent_address(token, g, kv, d):
    """Return (beat, byte) of a token's exponent; token counts from the start of the segment."""
    return (token // 64) * group_beats(kv, d) + g, token % 64


def code_address(token, g, j, kv, d):
    """Return (byte of the segment, bit) of a code."""
    start = 64 * ((token // 64) * group_beats(kv, d) + kv)
    half = padded_dim(d) // 2
    byte = start + ((token % 64) * kv + g) * half + 16 * (j // 32) + j % 16
    return byte, 4 * (j % 32 // 16)


def shadow(tokens, kv, d, segment_tokens, first_token=0):
    """Return the bytes of a segment; tokens is a list of (exponents[kv], codes[kv][d])."""
    image = 0
    for index, (exponents, codes) in enumerate(tokens):
        token = first_token + index
        for g in range(kv):
            beat, byte = exponent_address(token, g, kv, d)
            image |= exponents[g] << (8 * (64 * beat + byte))
            for j in range(d):
                byte, bit = code_address(token, g, j, kv, d)
                image |= (codes[g][j] % 16) << (8 * byte + bit)
    return image.to_bytes(64 * group_beats(kv, d) * (segment_tokens // 64), "little")


def exact_count(length, share, least, kept, selected):
    wanted = floor(to_float64(to_float64(Fraction(share) * length) + Fraction(1, 2)))
    return min(selected, max(kept, least, wanted))


# Attention


def fma(a, b, c):
    return to_float32(a * b + c)


def product(query, key):
    """Return x of one exact token, from fractions."""
    lanes = [Fraction(0)] * 16
    for j, (q, k) in enumerate(zip(query, key, strict=True)):
        lanes[j % 16] = fma(q, k, lanes[j % 16])
    for step in (8, 4, 2, 1):
        lanes = [to_float32(lanes[lane] + lanes[lane + step]) for lane in range(step)]
    return lanes[0]


def fixed_product(x):
    return round_half_even(clamp(x, Fraction(32767)) * 2**16)


def fixed_aligned(aligned):
    return clamp(aligned, 2**23 - 1) * 2**8


@cache
def step(i):
    """Return T_i, the integer nearest to 2^(23 + i/256)."""
    low, high = 2**23, 2**24
    while low < high:
        middle = (low + high) // 2
        # Is 2^(24 + i/256) below 2·middle + 1? No such power but the first and last is whole.
        if 2 ** (24 * 256 + i) < (2 * middle + 1) ** 256:
            high = middle
        else:
            low = middle + 1
    return low


def mantissa(f):
    i, rest = divmod(f, 256)
    return step(i) + floor(Fraction((step(i + 1) - step(i)) * rest + 128, 256))


def weights(fixed):
    """Return (R, weights, W) of a block: integers X in, fractions out."""
    reference = ceil(Fraction(max(fixed), 2**16))
    found, total = [], 0
    for x in fixed:
        whole, f = divmod(x - reference * 2**16, 2**16)
        weight = mantissa(f) * power(whole - 23) if whole >= -40 else Fraction(0)
        found.append(weight)
        total += floor(weight * power(40))
    return reference, found, total


def exact_block(fixed, values):
    """Return (R, W, outputs) of rows; values are fractions [tokens][d]."""
    reference, found, total = weights(fixed)
    outputs = [Fraction(0)] * len(values[0])
    for weight, row in zip(found, values, strict=True):
        outputs = [fma(weight, v, o) for v, o in zip(row, outputs, strict=True)]
    return reference, total, outputs


def coded_block(fixed, codes, exponents, stats):
    """Return (R, W, outputs) of coded tokens: codes [tokens][d], t, and (c, M) of channels."""
    reference, found, total = weights(fixed)
    products = [weight * 2**t for weight, t in zip(found, exponents, strict=True)]
    top = floor_log2(max(products)) + 1
    addends = [round_half_up(p * power(15 - top)) for p in products]
    outputs = []
    for j, (c, mean) in enumerate(stats):
        distance = sum(a * row[j] for a, row in zip(addends, codes, strict=True)) * power(top - 15)
        share = to_float32(Fraction(total)) * power(-40)
        outputs.append(fma(share, Fraction(mean), distance) * power(c - 14))
    return reference, total, outputs


def merge(blocks):
    """Return the outputs of blocks (R, W, outputs), exact ones first."""
    largest = max(reference for reference, _, _ in blocks)
    total, sums = 0, [Fraction(0)] * len(blocks[0][2])
    for reference, weight, outputs in blocks:
        if largest - reference <= 40:
            total += weight // 2 ** (largest - reference)
            moved = [to_float32(value * power(reference - largest)) for value in outputs]
            sums = [to_float32(s + m) for s, m in zip(sums, moved, strict=True)]
    whole = to_float32(Fraction(total)) * power(-40)
    return [to_float32(value / whole) for value in sums]


def cut(tokens):
    return [tokens[i : i + 64] for i in range(0, len(tokens), 64)]


def attend(query, keys, values, segments):
    """Return the outputs of one query head from fractions.

    segments is a list of (aligned, codes, exponents, (c, M) of channels), each of one segment's
    coded tokens in this KV head.
    """
    blocks = []
    for part in cut(list(range(len(keys)))):
        fixed = [fixed_product(product(query, keys[i])) for i in part]
        blocks.append(exact_block(fixed, [values[i] for i in part]))
    for aligned, codes, exponents, stats in segments:
        for part in cut(list(range(len(aligned)))):
            blocks.append(
                coded_block(
                    [fixed_aligned(aligned[i]) for i in part],
                    [codes[i] for i in part],
                    [exponents[i] for i in part],
                    stats,
                )
            )
    return merge(blocks)
