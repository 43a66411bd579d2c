# SPDX-License-Identifier: Apache-2.0
"""The contract once more, one number at a time in Python integers, to hold golden against.

Written for the eye: no arrays, no shared code with the package, unbounded integers.
"""

import math
import struct
from fractions import Fraction

BITS = {"fp16": 8, "int8": 8, "int4": 4, "int2": 2}


def rne(value):
    return round(Fraction(value))


def halves_to_even(value, divisor):
    """rne(value / divisor) of integers; as `rne`, but quick enough for every FP16 code."""
    floor, rest = divmod(value, divisor)
    return floor + (2 * rest > divisor or (2 * rest == divisor and floor % 2 == 1))


def clamp(value, limit):
    return max(-limit, min(limit, value))


def align(value, shift):
    if shift >= 0:
        return value << shift
    return (value + (1 << (-shift - 1))) >> -shift


def parts(code):
    """Sign, m, E of one FP16 code; m 0 for NaN."""
    sign = -1 if code & 0x8000 else 1
    field, fraction = (code >> 10) & 31, code & 1023
    if field == 31:
        return (sign, 2047, 30) if fraction == 0 else (1, 0, 1)
    return sign, fraction + (1024 if field else 0), max(field, 1)


def is_nan(code):
    return (code & 0x7FFF) > 0x7C00


def channel_statistics(codes):
    """c and M of one channel from its tokens' FP16 codes."""
    values = [sign * m * 2 ** (exponent - 1) for sign, m, exponent in map(parts, codes)]
    mean = halves_to_even(sum(values), len(values))
    deviation = sum(abs(value - mean) for value in values) // len(values)
    peak = max(abs(value) for value in values)
    c = min(max(deviation.bit_length() - 21, peak.bit_length() - 33, -14), 16)
    return c, clamp(rne(Fraction(mean) / Fraction(2) ** (c + 10)), 2**23 - 1)


def centred(code, c, mean):
    sign, m, exponent = parts(code)
    u = exponent - c
    size = m << (u - 11) if u >= 11 else m >> (11 - u)
    return sign * min(size, 2**23 - 1) - mean


def key(codes, cs, means, mode):
    """t and codes of one token in one KV head."""
    if any(is_nan(code) for code in codes):
        return 255, [0] * len(codes)
    distances = [centred(*channel) for channel in zip(codes, cs, means, strict=True)]
    length = max(abs(distance) for distance in distances).bit_length()
    t = max(length - (7 if BITS[mode] == 8 else 3), 0)
    if mode == "int2":
        return t, [min(max(distance >> (t + 1), -2), 1) for distance in distances]
    limit = 7 if mode == "int4" else 127
    return t, [clamp(halves_to_even(distance, 2**t), limit) for distance in distances]


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def group_sum(rows):
    totals = [0.0] * len(rows[0])
    for row in rows:
        totals = [total + value for total, value in zip(totals, row, strict=True)]
    return [float32(total) for total in totals]


def query(row, cs, means, scaling):
    """s, codes and o of one query head."""
    factor = float32(scaling * 1.4426950408889634)
    scaled = [Fraction(float32(value * factor)) for value in row]
    weighted = [value * Fraction(2) ** c for value, c in zip(scaled, cs, strict=True)]
    peak = max(abs(value) for value in weighted)
    s = -7
    if peak:
        exponent = 0
        while Fraction(2) ** exponent <= peak:
            exponent += 1
        while Fraction(2) ** (exponent - 1) > peak:
            exponent -= 1
        s = max(-128, min(127, exponent - 7))
    codes = [clamp(rne(value / Fraction(2) ** s), 127) for value in weighted]
    total = sum(code * mean for code, mean in zip(codes, means, strict=True))
    return s, codes, clamp(align(total, max(-40, min(24, s - 6))), 2**23 - 1)


def aligned(query_head, token, mode):
    """L' of one query head and one token."""
    s, query_codes, correction = query_head
    t, key_codes = token
    values = [2 * code + 1 for code in key_codes] if mode == "int2" else key_codes
    product = sum(q * k for q, k in zip(query_codes, values, strict=True))
    return clamp(align(product, max(-24, min(24, s + t - 6))), 2**23 - 1) + correction


def weight(z):
    integer, fraction = z >> 8, z & 255
    if integer >= 24:
        return 2**48 - 1
    return (
        (256 + fraction) << (integer + 16)
        if integer >= -16
        else (256 + fraction) >> (-integer - 16)
    )


def mag(value):
    if value < 1024:
        return value
    length = value.bit_length()
    return ((length - 10) << 10) | ((value >> (length - 11)) & 1023)


def weight_code(weights):
    return 1 + mag(min(sum(weights), 2**48 - 1))


def raw_code(value):
    return 32768 + mag(value) if value >= 0 else 32767 - mag(-value - 1)


def references(length):
    recent = {p for p in range(length) if p < 4 or p >= length - 256}
    return sorted(recent), [p for p in range(length) if p % 16 == 0 and p not in recent]


def weight_offset(values, probes):
    """B from L' of R and of Φ."""
    if not values and not probes:
        return 0
    top = max(values + probes)
    total = sum(weight(v - top) for v in values) + 16 * sum(weight(v - top) for v in probes)
    length = total.bit_length()
    return top + ((length - 25) << 8) + ((total >> (length - 9)) & 255)


def raw_offset(sums):
    return math.floor(Fraction(sum(sums), len(sums))) if sums else 0


def sequence_statistics(keys, segment_tokens):
    """(c, M) lists [segment][kv][channel] of a whole sequence, keys[token][kv][channel]."""
    segments = []
    for base in range(0, len(keys), segment_tokens):
        own = [p for p in range(base, min(base + segment_tokens, len(keys))) if p >= 4]
        shape = [(g, j) for g in range(len(keys[0])) for j in range(len(keys[0][0]))]
        if base and 2 * len(own) < segment_tokens:
            segments.append(segments[-1])
        elif base == 0 and len(own) < 32:
            segments.append(dict.fromkeys(shape, (4, 0)))
        else:
            segments.append(
                {(g, j): channel_statistics([keys[p][g][j] for p in own]) for g, j in shape}
            )
    return segments


def sequence_codes(keys, rows, scaling, group, mode, rule, scope, segment_tokens):
    """Score codes [set][token] of a whole sequence, all steps."""
    kv, channels = len(keys[0]), len(keys[0][0])
    if rule == "raw_sum":
        rows = [group_sum(rows[g * group : (g + 1) * group]) for g in range(kv)]
        group = 1
    queries, tokens = [], []
    for statistics in sequence_statistics(keys, segment_tokens):
        cs = [[statistics[g, j][0] for j in range(channels)] for g in range(kv)]
        means = [[statistics[g, j][1] for j in range(channels)] for g in range(kv)]
        base = len(queries) * segment_tokens
        queries.append(
            [query(row, cs[h // group], means[h // group], scaling) for h, row in enumerate(rows)]
        )
        for position in range(base, min(base + segment_tokens, len(keys))):
            tokens.append([key(keys[position][g], cs[g], means[g], mode) for g in range(kv)])
    products = [
        [
            aligned(queries[p // segment_tokens][h], tokens[p][h // group], mode)
            for h in range(len(rows))
        ]
        for p in range(len(keys))
    ]
    invalid = [[token[g][0] == 255 for g in range(kv)] for token in tokens]
    if scope == "layer":
        sets = [(range(len(rows)), range(kv))]
    else:
        sets = [(range(g * group, (g + 1) * group), [g]) for g in range(kv)]
    recent, probes = references(len(keys))
    result = []
    for heads, kv_heads in sets:
        unranked = [any(marks[g] for g in kv_heads) for marks in invalid]
        if rule == "weight_sum":
            bases = {
                h: weight_offset(
                    [products[p][h] for p in recent if not invalid[p][h // group]],
                    [products[p][h] for p in probes if not invalid[p][h // group]],
                )
                for h in heads
            }
            codes = [weight_code([weight(row[h] - bases[h]) for h in heads]) for row in products]
        else:
            sums = [sum(row[h] for h in heads) for row in products]
            base = raw_offset([sums[p] for p in recent + probes if not unranked[p]])
            codes = [raw_code(value - base) for value in sums]
        result.append([0 if bad else code for bad, code in zip(unranked, codes, strict=True)])
    return result
