# SPDX-License-Identifier: Apache-2.0
"""The oracle's channel statistics and key codes (docs/scoring-contract.md, section 3)."""

from fractions import Fraction
from math import floor

from oracle_numbers import (
    bl,
    clamp,
    fp16_value,
    power,
    ratio_half_even,
    round_half_even,
    truncated_ratio,
)

LIMIT = 2**23 - 1
INVALID = 255
LARGEST_CODE = {"fp16": 127, "int8": 127, "int4": 7}


def channel(values):
    """Return (c, M) of one channel from the FP16 values of its tokens, fractions, NaN already 0."""
    count = len(values)
    # Every finite FP16 value is a whole number of smallest subnormals, 2^-24.
    steps = [int(value * 2**24) for value in values]
    mean = round_half_even(Fraction(sum(steps), count))
    deviation = floor(Fraction(sum(abs(step - mean) for step in steps), count))
    peak = max(abs(step) for step in steps)
    exponent = -14
    # The smallest power of two that keeps the mean deviation below 2^(c-3) and the peak
    # below 2^(c+9), so that centring does not saturate.
    while exponent < 16 and (
        deviation * power(-24) >= power(exponent - 3) or peak * power(-24) >= power(exponent + 9)
    ):
        exponent += 1
    unit = power(exponent - 14)
    return exponent, clamp(round_half_even(mean * power(-24) / unit), LIMIT)


def own_tokens(tokens, first_position):
    """Return how many of the segment's tokens are no sinks."""
    return sum(1 for index in range(tokens) if first_position + index >= 4)


def statistics(keys, first_position, segment_tokens, preceding):
    """Return {(g, j): (c, M)} of a segment; keys is a nested list [n][kv][d] of FP16 codes.

    preceding is the same mapping of the segment before, or None in the first segment.
    """
    own = [keys[i] for i in range(len(keys)) if first_position + i >= 4]
    heads, channels = range(len(keys[0])), range(len(keys[0][0]))
    if first_position == 0:
        if len(own) < 32:
            return {(g, j): (4, 0) for g in heads for j in channels}
    elif 2 * len(own) < segment_tokens:
        return dict(preceding)
    return {
        (g, j): channel([fp16_value(token[g][j]) or Fraction(0) for token in own])
        for g in heads
        for j in channels
    }


def centred(value, exponent, mean):
    """Return D: the value in units of 2^(c-14), cut towards zero and limited, less the mean."""
    unit = power(exponent - 14)
    steps = truncated_ratio(value.numerator * unit.denominator, value.denominator * unit.numerator)
    return clamp(steps, LIMIT) - mean


def token_codes(differences, mode):
    """Return (t, codes) of one token and KV head from its D."""
    length = bl(max(abs(difference) for difference in differences))
    if mode in LARGEST_CODE:
        shift = max(length - (3 if mode == "int4" else 7), 0)
        codes = [
            clamp(ratio_half_even(difference, 2**shift), LARGEST_CODE[mode])
            for difference in differences
        ]
    else:
        shift = max(length - 3, 0)
        # The four values are -3, -1, 1, 3 in units of 2^t: which interval of width 2^(t+1)?
        codes = [max(-2, min(1, difference // 2 ** (shift + 1))) for difference in differences]
    return shift, codes


def code_value(code, mode):
    """Return what a stored code stands for, in units of 2^t."""
    return 2 * code + 1 if mode == "int2" else code


def encode(token, stats, mode):
    """Return (exponents[kv], codes[kv][d]) of one token, a nested list [kv][d] of FP16 codes."""
    exponents, codes = [], []
    for g, row in enumerate(token):
        values = [fp16_value(bits) for bits in row]
        if any(value is None for value in values):
            exponents.append(INVALID)
            codes.append([0] * len(row))
            continue
        shift, head = token_codes(
            [centred(value, *stats[g, j]) for j, value in enumerate(values)], mode
        )
        exponents.append(shift)
        codes.append(head)
    return exponents, codes
