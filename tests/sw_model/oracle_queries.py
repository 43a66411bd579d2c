# SPDX-License-Identifier: Apache-2.0
"""The oracle's query codes, mean corrections and aligned products (page, sections 4 and 5)."""

from fractions import Fraction
from math import isfinite

from oracle_keys import LIMIT, code_value
from oracle_numbers import (
    OracleNonFiniteError,
    clamp,
    floor_log2,
    power,
    round_half_even,
    round_half_up,
    to_float32,
    to_float64,
)

LOG2_E = 1.4426950408889634


def scaled_query(query, scaling):
    """Return q' as fractions from the float32 values of one query, a list of Python floats."""
    if not all(isfinite(value) for value in query):
        raise OracleNonFiniteError("the query is not finite")
    factor = to_float32(to_float64(Fraction(scaling) * Fraction(LOG2_E)))
    return [to_float32(Fraction(value) * factor) for value in query]


def summed_query(queries):
    """Return the float32 sum of a KV head's queries, added one by one in float64."""
    if not all(isfinite(value) for query in queries for value in query):
        raise OracleNonFiniteError("the query is not finite")
    sums = []
    for j in range(len(queries[0])):
        total = Fraction(0)
        for query in queries:
            total = to_float64(total + Fraction(query[j]))
        sums.append(float(to_float32(total)))
    return sums


def query_codes(scaled, exponents):
    """Return (s, codes) of one scaled query against the channel exponents of its segment."""
    values = [value * power(c) for value, c in zip(scaled, exponents, strict=True)]
    peak = max(abs(value) for value in values)
    # 64 <= peak / 2^s < 128 wherever s is not at the ends of its byte.
    s = -7 if peak == 0 else max(-128, min(127, floor_log2(peak) + 1 - 7))
    return s, [clamp(round_half_even(value / power(s)), 127) for value in values]


def correction(s, codes, means):
    """Return o_h: the mean's share of the inner product, in 1/256."""
    total = sum(code * mean for code, mean in zip(codes, means, strict=True))
    return clamp(round_half_up(total * power(max(-40, min(24, s - 6)))), LIMIT)


def encode(queries, stats, scaling, rule, group_size):
    """Return [(s, codes, o)] of every scored head from float lists [H][d]."""
    kv = max(g for g, _ in stats) + 1
    d = len(queries[0])
    if rule == "raw_sum":
        queries = [summed_query(queries[g * group_size : (g + 1) * group_size]) for g in range(kv)]
        group_size = 1
    coded = []
    for h, query in enumerate(queries):
        g = h // group_size
        s, codes = query_codes(scaled_query(query, scaling), [stats[g, j][0] for j in range(d)])
        coded.append((s, codes, correction(s, codes, [stats[g, j][1] for j in range(d)])))
    return coded


def aligned_product(s, codes, o, t, key_codes, mode):
    """Return L' of one query head and token: log2 of the weight in 1/256."""
    product = sum(q * code_value(k, mode) for q, k in zip(codes, key_codes, strict=True))
    return clamp(round_half_up(product * power(clamp(s + t - 6, 24))), LIMIT) + o
