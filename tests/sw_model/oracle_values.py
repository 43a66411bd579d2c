# SPDX-License-Identifier: Apache-2.0
"""The oracle's value codes and attention over rows and codes (page, sections 14 to 16)."""

from fractions import Fraction
from functools import cache
from math import ceil, floor

from oracle_numbers import (
    clamp,
    floor_log2,
    fp16_value,
    power,
    round_half_even,
    round_half_up,
    round_to_float,
    to_float32,
    to_float64,
)

INVALID = 255
LARGEST = 247


# Value codes


def half_code(value):
    """Return the FP16 code of a fraction, rounded to nearest, halves to even."""
    rounded = round_to_float(value, 11, -24, 15)
    sign, size = (0x8000, -rounded) if rounded < 0 else (0, rounded)
    if size < power(-14):
        return sign | int(size * power(24))
    exponent = floor_log2(size)
    return sign | (exponent + 15) * 1024 + int((size * power(-exponent) - 1) * 1024)


def mean_code(values):
    """Return the mean of one channel as an FP16 code; values are fractions, NaN already 0."""
    total = sum(value * power(24) for value in values)
    return half_code(round_half_even(total / len(values)) * power(-24))


def means(values, first_position, segment_tokens, preceding):
    """Return {(g, j): code} of a segment; values is a nested list [n][kv][d] of FP16 codes."""
    own = [values[i] for i in range(len(values)) if first_position + i >= 4]
    heads, channels = range(len(values[0])), range(len(values[0][0]))
    if first_position == 0:
        if len(own) < 32:
            return {(g, j): 0 for g in heads for j in channels}
    elif 2 * len(own) < segment_tokens:
        return dict(preceding)
    return {
        (g, j): mean_code([fp16_value(token[g][j]) or Fraction(0) for token in own])
        for g in heads
        for j in channels
    }


@cache
def scale(byte):
    """Return what a scale's byte stands for."""
    e, f = divmod(byte, 8)
    return (8 + f) * power(e - 20)


def head_codes(distances):
    """Return (b, codes) of one token and KV head from its D."""
    largest = max(abs(distance) for distance in distances)
    fitting = (b for b in range(LARGEST + 1) if Fraction(15, 2) * scale(b) >= largest)
    byte = next(fitting, LARGEST)
    return byte, [clamp(round_half_even(distance / scale(byte)), 7) for distance in distances]


def encode(token, table):
    """Return (bytes[kv], codes[kv][d]) of one token, a nested list [kv][d] of FP16 codes."""
    scales, codes = [], []
    for g, row in enumerate(token):
        values = [fp16_value(bits) for bits in row]
        if any(value is None for value in values):
            scales.append(INVALID)
            codes.append([0] * len(row))
            continue
        byte, head = head_codes([v - fp16_value(table[g, j]) for j, v in enumerate(values)])
        scales.append(byte)
        codes.append(head)
    return scales, codes


# Layout


def padded_dim(d):
    while d % 32 or d < 64:
        d += 1
    return d


def group_beats(kv, d):
    return kv * (1 + padded_dim(d) // 2)


def scale_address(token, g, kv, d):
    """Return (beat, byte) of a token's scale; token counts from the start of the segment."""
    return (token // 64) * group_beats(kv, d) + g, token % 64


def code_address(token, g, j, kv, d):
    """Return (byte of the segment, bit) of a code."""
    start = 64 * ((token // 64) * group_beats(kv, d) + kv)
    half = padded_dim(d) // 2
    byte = start + ((token % 64) * kv + g) * half + 16 * (j // 32) + j % 16
    return byte, 4 * (j % 32 // 16)


def shadow(tokens, kv, d, segment_tokens, first_token=0):
    """Return the bytes of a segment; tokens is a list of (bytes[kv], codes[kv][d])."""
    image = 0
    for index, (scales, codes) in enumerate(tokens):
        token = first_token + index
        for g in range(kv):
            beat, byte = scale_address(token, g, kv, d)
            image |= scales[g] << (8 * (64 * beat + byte))
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


def coded_block(fixed, codes, scales, means_of):
    """Return (R, W, outputs) of coded tokens: codes [tokens][d], scale bytes, means fractions."""
    reference, found, total = weights(fixed)
    products = [weight * scale(byte) for weight, byte in zip(found, scales, strict=True)]
    top = floor_log2(max(products)) + 1
    addends = [min(round_half_up(p * power(15 - top)), 2**15 - 1) for p in products]
    outputs = []
    for j, mean in enumerate(means_of):
        distance = sum(a * row[j] for a, row in zip(addends, codes, strict=True)) * power(top - 15)
        outputs.append(fma(to_float32(Fraction(total)) * power(-40), mean, distance))
    return reference, total, outputs


def merge(blocks):
    """Return the outputs of blocks (R, W, outputs), exact ones first."""
    largest = max(reference for reference, _, _ in blocks)
    total, sums = 0, [Fraction(0)] * len(blocks[0][2])
    for reference, weight, outputs in blocks:
        if largest - reference <= 40:
            total += weight // 2 ** (largest - reference)
            moved = [value * power(reference - largest) for value in outputs]
            sums = [to_float32(s + m) for s, m in zip(sums, moved, strict=True)]
    whole = to_float32(Fraction(total)) * power(-40)
    return [to_float32(value / whole) for value in sums]


def cut(tokens):
    return [tokens[i : i + 64] for i in range(0, len(tokens), 64)]


def attend(query, keys, values, segments):
    """Return the outputs of one query head from fractions.

    segments is a list of (aligned, codes, scale bytes, means), each of one segment's coded tokens
    in this KV head.
    """
    blocks = []
    for part in cut(list(range(len(keys)))):
        fixed = [fixed_product(product(query, keys[i])) for i in part]
        blocks.append(exact_block(fixed, [values[i] for i in part]))
    for aligned, codes, scales, means_of in segments:
        for part in cut(list(range(len(aligned)))):
            blocks.append(
                coded_block(
                    [fixed_aligned(aligned[i]) for i in part],
                    [codes[i] for i in part],
                    [scales[i] for i in part],
                    means_of,
                )
            )
    return merge(blocks)
