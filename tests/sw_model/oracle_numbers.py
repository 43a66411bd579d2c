# SPDX-License-Identifier: Apache-2.0
"""Exact numbers for the oracle: what an FP16 code is worth and every rounding the contract uses.

The oracle computes with Python integers and fractions, from docs/scoring-contract.md alone. It
shares no code with the golden model and never shifts where it can say what a value means.
"""

from fractions import Fraction
from functools import cache
from math import floor

LARGEST_HALF = Fraction(65504)


class OracleNonFiniteError(ValueError):
    """A query that the contract refuses."""


def bl(value):
    """Return the least L with value < 2^L, for value >= 0."""
    assert value >= 0
    length = 0
    while value >= 2**length:
        length += 1
    return length


def floor_log2(value):
    """Return the integer e with 2^e <= value < 2^(e+1), for a positive fraction."""
    assert value > 0
    # A start within one of the answer; the loops make it exact.
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    while power(exponent) > value:
        exponent -= 1
    while power(exponent + 1) <= value:
        exponent += 1
    return exponent


@cache
def power(exponent):
    """Return 2^exponent, exact for either sign of the exponent."""
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def clamp(value, limit):
    return max(-limit, min(limit, value))


def round_half_even(value):
    return ratio_half_even(value.numerator, value.denominator)


def ratio_half_even(numerator, denominator):
    """Return the integer nearest to a ratio with a positive denominator; of two, the even one."""
    below, rest = divmod(numerator, denominator)
    if 2 * rest == denominator:
        return below if below % 2 == 0 else below + 1
    return below if 2 * rest < denominator else below + 1


def round_half_up(value):
    return floor(value + Fraction(1, 2))


def truncated_ratio(numerator, denominator):
    """Return the integer nearest to a ratio towards zero; the denominator is positive."""
    return numerator // denominator if numerator >= 0 else -(-numerator // denominator)


@cache
def fp16_value(bits):
    """Return the value of an FP16 code as a fraction; None for NaN, the largest finite for inf."""
    sign = -1 if bits >= 0x8000 else 1
    exponent, fraction = divmod(bits % 0x8000, 1024)
    if exponent == 31:
        return None if fraction else sign * LARGEST_HALF
    if exponent == 0:
        return sign * fraction * power(-24)
    return sign * (1 + Fraction(fraction, 1024)) * power(exponent - 15)


def round_to_float(value, precision, least_exponent, largest_exponent):
    """Round a fraction to the nearest binary float, ties to even, subnormals kept.

    precision counts the significant bits; least_exponent is that of the smallest subnormal.
    """
    if value == 0:
        return Fraction(0)
    unit = power(max(floor_log2(abs(value)) - (precision - 1), least_exponent))
    rounded = round_half_even(value / unit) * unit
    if abs(rounded) >= power(largest_exponent + 1):
        raise OracleNonFiniteError(f"{float(value)} overflows")
    return rounded


def to_float32(value):
    return round_to_float(value, 24, -149, 127)


def to_float64(value):
    return round_to_float(value, 53, -1074, 1023)
