# SPDX-License-Identifier: Apache-2.0
"""The oracle's offsets, weights, score codes and selection (contract page, sections 6 to 8)."""

from fractions import Fraction
from math import floor

from oracle_numbers import floor_log2, power, to_float64

ONE = 2**24
LARGEST_WEIGHT = 2**48 - 1


def weight(z):
    """Return w of log2 weight z/256: a straight line between powers of two, cut to an integer."""
    whole = floor(Fraction(z, 256))
    if whole >= 24:
        return LARGEST_WEIGHT
    return floor(ONE * power(whole) * (1 + Fraction(z - 256 * whole, 256)))


def line_log2(value):
    """Return the inverse of the straight lines: e + (value / 2^e - 1)."""
    exponent = floor_log2(value)
    return exponent + value / power(exponent) - 1


def reference_positions(length, predicted=()):
    """Return (R, probes) for a context of length tokens; predicted positions have no key yet."""
    recent = {p for p in range(length) if p < 4 or p >= length - 256}
    probes = {p for p in range(0, length, 16) if p not in recent}
    return sorted(recent - set(predicted)), sorted(probes - set(predicted))


def weight_offset(recent, probes):
    """Return B of one head from the L' of its valid tokens in R and among the probes."""
    if not recent and not probes:
        return 0
    top = max(recent + probes)
    total = sum(weight(v - top) for v in recent) + 16 * sum(weight(v - top) for v in probes)
    return top + floor(256 * line_log2(Fraction(total, ONE)))


def raw_offset(sums):
    """Return A from the sums of L' of the valid reference tokens."""
    return floor(Fraction(sum(sums), len(sums))) if sums else 0


def mag(value):
    """Return the monotone short code of v >= 0: exact below 1024, then 10 fraction bits."""
    if value < 1024:
        return value
    exponent = floor_log2(value)
    return 1024 * (exponent - 9) + floor(1024 * (value / power(exponent) - 1))


def weight_code(weights):
    return 1 + mag(min(sum(weights), LARGEST_WEIGHT))


def raw_code(value):
    return 32768 + mag(value) if value >= 0 else 32767 - mag(-value - 1)


def heads_of(rule, scope, kv, group_size):
    """Return, per selected set, the scored heads that share it and the KV heads they read."""
    per_kv = 1 if rule == "raw_sum" else group_size
    owned = [[g * per_kv + r for r in range(per_kv)] for g in range(kv)]
    if scope == "kv_head":
        return [(owned[g], [g]) for g in range(kv)]
    return [([h for heads in owned for h in heads], list(range(kv)))]


def offsets(aligned, invalid, rule, scope, group_size, predicted=()):
    """Return B per head, or A per selected set, from L'[H][N] and invalid[N][kv]."""
    recent, probes = reference_positions(len(invalid), predicted)
    kv = len(invalid[0])
    if rule == "weight_sum":
        return [
            weight_offset(
                [row[p] for p in recent if not invalid[p][h // group_size]],
                [row[p] for p in probes if not invalid[p][h // group_size]],
            )
            for h, row in enumerate(aligned)
        ]
    return [
        raw_offset(
            [
                sum(aligned[h][p] for h in heads)
                for p in recent + probes
                if not any(invalid[p][g] for g in kv_heads)
            ]
        )
        for heads, kv_heads in heads_of(rule, scope, kv, group_size)
    ]


def score_codes(aligned, offset, invalid, rule, scope, group_size):
    """Return the score codes [sets][N]."""
    tables = []
    sets = heads_of(rule, scope, len(invalid[0]), group_size)
    for index, (heads, kv_heads) in enumerate(sets):
        table = []
        for p, flags in enumerate(invalid):
            if any(flags[g] for g in kv_heads):
                table.append(0)
            elif rule == "weight_sum":
                table.append(weight_code([weight(aligned[h][p] - offset[h]) for h in heads]))
            else:
                table.append(raw_code(sum(aligned[h][p] for h in heads) - offset[index]))
        tables.append(table)
    return tables


def selected_count(length, alpha, kept, max_selected):
    share = floor(to_float64(to_float64(Fraction(alpha) * length) + Fraction(1, 2)))
    return min(length, max(kept + 1, min(max_selected, share)))


def kept_positions(length, sinks, recent):
    return [p for p in range(length) if p < sinks or p >= length - recent]


def select(codes, count, kept):
    """Return the selected positions, ascending: the kept ones, then the best of the others."""
    others = [p for p in range(len(codes)) if p not in set(kept)]
    others.sort(key=lambda p: (-codes[p], p))
    return sorted(list(kept) + others[: max(count - len(kept), 0)])
