# SPDX-License-Identifier: Apache-2.0
"""The golden model's query codes, corrections and aligned products against the oracle."""

import math
from fractions import Fraction

import numpy as np
import oracle_numbers
import oracle_queries
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, from_statistics, same, to_statistics

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.query_codes import QueryCodes, encode_query
from hillinfer_model.scores import aligned_products

LIMIT = 2**23 - 1
LN2 = math.log(2)
SMALLEST = 2.0**-149
LARGEST = float(np.finfo(np.float32).max)


def spec_of(d, kv=1, group=1, rule=Rule.WEIGHT_SUM, mode=KeyMode.INT8):
    return KernelSpec(d, kv, group, key_mode=mode, rule=rule)


def statistics_of(rows):
    table = {(g, j): cell for g, row in enumerate(rows) for j, cell in enumerate(row)}
    return to_statistics(table, len(rows), len(rows[0]))


def queries_alike(query, statistics, scaling, spec, golden_query=None, golden_statistics=None):
    query = np.asarray(query, dtype=np.float32)
    found = encode_query(
        query if golden_query is None else golden_query,
        statistics if golden_statistics is None else golden_statistics,
        scaling,
        spec,
    )
    expected = oracle_queries.encode(
        query.tolist(), from_statistics(statistics), scaling, spec.rule.value, spec.group_size
    )
    return (
        same(found.exponents, np.int8, [s for s, _, _ in expected])
        and same(found.codes, np.int8, [codes for _, codes, _ in expected])
        and same(found.corrections, np.int32, [o for _, _, o in expected])
    )


def steps(value, count=1):
    """Return float32 neighbours of a value, itself included."""
    around = [np.float32(value)]
    for _ in range(count):
        around = [
            np.nextafter(around[0], np.float32(-np.inf)),
            *around,
            np.nextafter(around[-1], np.float32(np.inf)),
        ]
    return [float(v) for v in around if np.isfinite(v)]


# The oracle's own rounding against IEEE hardware


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_oracle_rounds_to_float32_as_ieee(value):
    with np.errstate(over="ignore"):
        expected = np.float64(value).astype(np.float32)
    if np.isinf(expected):
        with pytest.raises(oracle_numbers.OracleNonFiniteError):
            oracle_numbers.to_float32(Fraction(value))
    else:
        assert oracle_numbers.to_float32(Fraction(value)) == Fraction(float(expected))


FINITE = st.floats(-(2.0**500), 2.0**500)


@settings(max_examples=200, deadline=None)
@given(FINITE, FINITE)
def test_the_oracle_rounds_to_float64_as_ieee(a, b):
    assert oracle_numbers.to_float64(Fraction(a) * Fraction(b)) == Fraction(a * b)
    assert oracle_numbers.to_float64(Fraction(a) + Fraction(b)) == Fraction(a + b)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(Fraction(3, 2) * 2, 3), (2**24 + 1, 2**24), (2**24 + 3, 2**24 + 4), (Fraction(1, 2**150), 0)],
)
def test_the_oracle_rounds_ties_to_even(value, rounded):
    assert oracle_numbers.to_float32(Fraction(value)) == rounded


# Query codes


@pytest.mark.parametrize("k", [*range(-149, -120), -20, -1, 0, 1, 6, 7, *range(110, 128)])
@pytest.mark.parametrize("c", [-14, 0, 16])
def test_query_exponent_at_powers_of_two(k, c):
    rows = [[sign * v, v / 3] for v in steps(2.0**k) for sign in (1, -1)]
    spec = spec_of(2, group=len(rows))
    assert queries_alike(rows, statistics_of([[(c, LIMIT), (c, -5)]]), LN2, spec)


def test_query_exponent_reaches_both_ends():
    found = [
        encode_query(
            np.array([[v]], dtype=np.float32), statistics_of([[(c, 0)]]), LN2, spec_of(1)
        ).exponents[0]
        for v, c in ((SMALLEST, -14), (LARGEST, 16), (0.0, 16), (-0.0, -14))
    ]
    assert found == [-128, 127, -7, -7]


@pytest.mark.parametrize("peak", [64.0, 127.0, 127.5, 127.75, 127.99999])
def test_query_codes_at_ties_and_at_the_limit(peak):
    others = [k / 2 for k in range(-20, 21)] + [126.5, -126.5, 125.5]
    rows = [
        [sign * peak, v] for v in others + steps(2.5) + steps(-0.5) if v < peak for sign in (1, -1)
    ]
    for first in range(0, len(rows), 64):
        part = rows[first : first + 64]
        spec = spec_of(2, group=len(part))
        assert queries_alike(part, statistics_of([[(0, 1), (0, 0)]]), LN2, spec)


def test_query_of_zeros_beside_others():
    rows = [[0.0, 0.0], [-0.0, 0.0], [SMALLEST, 0.0], [1.0, -1.0]]
    assert queries_alike(
        rows, statistics_of([[(16, LIMIT), (-14, -LIMIT)]]), 0.125, spec_of(2, 1, 4)
    )


@pytest.mark.parametrize("scaling", [0.125, 1 / math.sqrt(80), 1.0, 1e-30, 1e-44, 3e-46, 0.0])
def test_scaling_is_rounded_as_written(scaling):
    generator = np.random.default_rng(5)
    rows = generator.standard_normal((8, 4)).astype(np.float32) * 3
    statistics = statistics_of([[(4, 9), (-3, -70), (0, 1000), (2, 5)], [(1, 1)] * 4])
    assert queries_alike(rows, statistics, scaling, spec_of(4, 2, 4))


def test_channel_exponents_move_to_the_query():
    rows = [[1.0, 1.0, 1.0], [3.0, -(2.0**-20), 2.0**20]]
    statistics = statistics_of([[(-14, 100), (0, -100), (16, 3)]])
    assert queries_alike(rows, statistics, LN2, spec_of(3, 1, 2))
    for wrong in ((-14, 15), (16, 16)):
        other = statistics_of([[(wrong[0], 100), (0, -100), (wrong[1], 3)]])
        assert not queries_alike(rows, statistics, LN2, spec_of(3, 1, 2), golden_statistics=other)


# Mean correction


@pytest.mark.parametrize("s", [-128, -35, -34, -33, -20, -7, 0, 5, 6, 7, 12, 29, 30, 31, 100, 127])
def test_correction_at_every_shift(s):
    # The query is 64·2^s or 127·2^s, so its code and s are known; the means visit ties and ends.
    shift = max(6 - s, 0)
    ties = [k * 2**shift // (2 * 64) for k in (-5, -3, -1, 1, 3, 5)]
    means = [0, 1, -1, 2, -2, 63, -63, LIMIT, -LIMIT, *(t for t in ties if abs(t) <= LIMIT)]
    value = 2.0 ** (s + 6) if s + 6 <= 127 else LARGEST
    c = 0 if s + 6 <= 127 else 16
    c = -14 if s == -128 else c
    value = SMALLEST if s == -128 else value
    for mean in means:
        for d in (1, 4):
            statistics = statistics_of([[(c, mean)] * d])
            assert queries_alike([[value] * d], statistics, LN2, spec_of(d))


def test_correction_visits_its_limits():
    found = {
        int(
            encode_query(
                np.full((1, 256), 2.0**k, np.float32),
                statistics_of([[(0, mean)] * 256]),
                LN2,
                spec_of(256),
            ).corrections[0]
        )
        for k in (-40, -9, 0, 30, 60)
        for mean in (LIMIT, -LIMIT)
    }
    assert {LIMIT, -LIMIT, 0} <= found
    assert len(found) > 3


def test_correction_rounds_halves_up():
    # Σ = 64·M and ν = -7: M = 1 and M = -1 lie halfway.
    for mean, expected in ((1, 1), (-1, 0), (3, 2), (-3, -1)):
        statistics = statistics_of([[(0, mean)]])
        query = np.array([[32.0]], np.float32)
        found = encode_query(query, statistics, LN2, spec_of(1)).corrections
        assert same(found, np.int32, [expected])
        assert queries_alike(query, statistics, LN2, spec_of(1))


# raw_sum


@pytest.mark.parametrize(
    "column",
    [
        [1e30, 1.0, -1e30, 1.0],
        [1.0, 1e30, 1.0, -1e30],
        [2.0**53, 1.0, 1.0, 1.0],
        [2.0**24, 1.0, 2.0**-30, 0.0],
        [2.0**24, 1.0, -(2.0**-30), 0.0],
        [2.0**24, 1.0, 2.0**-40, 0.0],
        [2.0**24, 3.0, 0.0, 0.0],
        [SMALLEST] * 4,
        [LARGEST, LARGEST, -LARGEST, -1.0],
        [0.1, 0.2, 0.3, -0.6],
    ],
)
def test_queries_are_summed_in_order_and_rounded_once(column):
    rows = np.array([[v, 1.0] for v in column], dtype=np.float32)
    statistics = statistics_of([[(0, 1000), (0, -LIMIT)]])
    assert queries_alike(rows, statistics, LN2, spec_of(2, 1, 4, Rule.RAW_SUM))


def test_the_order_of_the_sum_is_seen():
    first, second = (
        oracle_queries.summed_query([[v] for v in column])
        for column in ([1e30, 1.0, -1e30, 1.0], [1e30, -1e30, 1.0, 1.0])
    )
    assert (first, second) == ([1.0], [2.0])
    rows = np.array([[1e30], [1.0], [-1e30], [1.0]], dtype=np.float32)
    spec, statistics = spec_of(1, 1, 4, Rule.RAW_SUM), statistics_of([[(0, 0)]])
    assert queries_alike(rows, statistics, LN2, spec)
    assert not queries_alike(rows, statistics, LN2, spec, golden_query=rows[[0, 2, 1, 3]])


def test_each_kv_head_sums_its_own_queries():
    generator = np.random.default_rng(6)
    rows = generator.standard_normal((6, 3)).astype(np.float32)
    statistics = statistics_of([[(0, 3), (1, -4), (2, 5)], [(-3, 100), (4, 7), (5, 0)]])
    spec = spec_of(3, 2, 3, Rule.RAW_SUM)
    assert queries_alike(rows, statistics, 0.125, spec)
    assert not queries_alike(rows, statistics, 0.125, spec, golden_query=rows[[0, 1, 3, 2, 4, 5]])


# Errors


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(
    ("row", "scaling", "refused"),
    [
        ([1.0, 2.0], 1.0, False),
        ([LARGEST, 0.0], 0.5, False),
        ([LARGEST, 0.0], 1.0, True),
        ([math.inf, 0.0], 1.0, True),
        ([0.0, -math.inf], 0.0, True),
        ([math.nan, 0.0], 1.0, True),
        ([0.0, 0.0], 1e300, True),
        ([1.0, 0.0], 1e38, False),
    ],
)
def test_queries_that_are_not_finite_are_refused(rule, row, scaling, refused):
    spec, statistics = spec_of(2, 1, 1, rule), statistics_of([[(0, 5), (0, 5)]])
    if not refused:
        assert queries_alike([row], statistics, scaling, spec)
        return
    with pytest.raises(NonFiniteQueryError):
        encode_query(np.array([row], np.float32), statistics, scaling, spec)
    with pytest.raises(oracle_numbers.OracleNonFiniteError):
        oracle_queries.encode([row], from_statistics(statistics), scaling, rule.value, 1)


@pytest.mark.parametrize(("others", "refused"), [([-1.0, 0.0], False), ([LARGEST, 1.0], True)])
def test_a_sum_that_overflows_is_refused(others, refused):
    rows = np.array([[LARGEST], *([v] for v in others)], dtype=np.float32)
    spec, statistics = spec_of(1, 1, 3, Rule.RAW_SUM), statistics_of([[(0, 0)]])
    if refused:
        with pytest.raises(NonFiniteQueryError):
            encode_query(rows, statistics, 0.125, spec)
        with pytest.raises(oracle_numbers.OracleNonFiniteError):
            oracle_queries.encode(rows.tolist(), from_statistics(statistics), 0.125, "raw_sum", 3)
    else:
        assert queries_alike(rows, statistics, 0.125, spec)


# Twins and any query


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bit", [17, 22, 23, 31])
def test_queries_notice_a_flipped_bit(rule, bit):
    rows = np.array([[1.0, 0.75], [0.5, -0.25]], dtype=np.float32)
    spec, statistics = spec_of(2, 1, 2, rule), statistics_of([[(0, 5000), (0, 70)]])
    assert queries_alike(rows, statistics, LN2, spec)
    assert not queries_alike(rows, statistics, LN2, spec, golden_query=flipped(rows, 0, bit))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_query(data):
    kv, group, d = (data.draw(st.integers(1, top)) for top in (2, 3, 3))
    cell = st.tuples(st.integers(-14, 16), st.integers(-LIMIT, LIMIT))
    row = st.lists(cell, min_size=d, max_size=d)
    statistics = statistics_of(data.draw(st.lists(row, min_size=kv, max_size=kv)))
    value = st.floats(width=32, allow_nan=False, allow_infinity=False)
    size = kv * group * d
    query = np.array(data.draw(st.lists(value, min_size=size, max_size=size)), np.float32)
    scaling = data.draw(st.sampled_from([0.125, 0.0883883461356163, 1.0, LN2]))
    spec = spec_of(d, kv, group, data.draw(st.sampled_from(list(Rule))))
    rows = query.reshape(kv * group, d)
    try:
        oracle_queries.encode(
            rows.tolist(), from_statistics(statistics), scaling, spec.rule.value, group
        )
    except oracle_numbers.OracleNonFiniteError:
        with pytest.raises(NonFiniteQueryError):
            encode_query(rows, statistics, scaling, spec)
    else:
        assert queries_alike(rows, statistics, scaling, spec)


# Product and alignment


def aligned_alike(query, keys, mode, kv, group, rule=Rule.WEIGHT_SUM, golden_keys=None):
    spec = spec_of(query.codes.shape[1], kv, group, rule, mode)
    per_kv = 1 if rule is Rule.RAW_SUM else group
    found = aligned_products(query, keys if golden_keys is None else golden_keys, spec)
    expected = [
        [
            oracle_queries.aligned_product(
                int(query.exponents[h]),
                query.codes[h].tolist(),
                int(query.corrections[h]),
                int(keys.exponents[i, h // per_kv]),
                keys.codes[i, h // per_kv].tolist(),
                mode.value,
            )
            for i in range(len(keys.codes))
        ]
        for h in range(len(query.codes))
    ]
    return same(found, np.int64, expected)


def query_of(codes, exponents, corrections):
    return QueryCodes(
        np.array(codes, np.int8), np.array(exponents, np.int8), np.array(corrections, np.int32)
    )


def keys_of(codes, exponents):
    return KeyCodes(np.array(codes, np.int8), np.array(exponents, np.uint8))


CODE_RANGE = {
    KeyMode.FP16: (-127, 127),
    KeyMode.INT8: (-127, 127),
    KeyMode.INT4: (-7, 7),
    KeyMode.INT2: (-2, 1),
}
SHIFTS = [-128, -31, -30, -29, -24, -19, -18, -17, -12, -2, -1, 0, 1, 2, 5, 12, 13, 29, 30, 31, 127]


@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("t", [0, 1, 5, 6, 17, 21])
def test_alignment_at_every_shift(mode, t):
    low, high = CODE_RANGE[mode]
    exponents = [s for s in SHIFTS for _ in range(3)]
    heads = [row for _ in SHIFTS for row in ([1, 0, 0], [-1, 0, 0], [127, -127, 64])]
    query = query_of(heads, exponents, [0, 5, -LIMIT] * len(SHIFTS))
    codes = [[[k, low, high]] for k in range(max(low, -9), high + 1)[:24]]
    keys = keys_of(codes, [[t]] * len(codes))
    assert aligned_alike(query, keys, mode, 1, len(heads))


@pytest.mark.parametrize("mode", list(KeyMode))
def test_alignment_of_the_largest_products(mode):
    low, high = CODE_RANGE[mode]
    exponents = [-128, -25, -18, -12, 6, 7, 8, 9, 30, 127]
    query = query_of(
        [[sign * 127] * 256 for sign in (1, -1) for _ in exponents],
        exponents * 2,
        [sign * LIMIT for sign in (1, -1) for _ in exponents],
    )
    keys = keys_of(
        [[[k] * 256] for k in (low, high) for _ in (0, 6, 21)],
        [[t] for _ in (0, 1) for t in (0, 6, 21)],
    )
    assert aligned_alike(query, keys, mode, 1, 20)


@pytest.mark.parametrize("s", range(-7, 7))
def test_alignment_rounds_halves_up(s):
    # P of every value around ties of each shift, from one channel.
    query = query_of([[1], [-1]], [s, s], [0, 1])
    keys = keys_of([[[k]] for k in range(-127, 128)], [[0]] * 255)
    assert aligned_alike(query, keys, KeyMode.INT8, 1, 2)


@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("rule", list(Rule))
def test_alignment_of_several_heads(mode, rule):
    generator = np.random.default_rng(7)
    low, high = CODE_RANGE[mode]
    heads = 3 if rule is Rule.RAW_SUM else 6
    query = query_of(
        generator.integers(-127, 128, (heads, 5)),
        generator.integers(-12, 3, heads),
        generator.integers(-9000, 9000, heads),
    )
    keys = keys_of(generator.integers(low, high + 1, (7, 3, 5)), generator.integers(0, 14, (7, 3)))
    assert aligned_alike(query, keys, mode, 3, 2, rule)
    for wrong in (
        KeyCodes(flipped(keys.codes), keys.exponents),
        KeyCodes(keys.codes, flipped(keys.exponents, 0, 3)),
    ):
        assert not aligned_alike(query, keys, mode, 3, 2, rule, golden_keys=wrong)
