# SPDX-License-Identifier: Apache-2.0
import math

import golden_scalar as scalar
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_query, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.choices import Rule
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.query_codes import QueryCodes, encode_query

LIMIT = 2**23 - 1
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# With this scaling φ is exactly 1.
UNIT = 1 / 1.4426950408889634


def encode(rows, exponents, means, scaling=UNIT, group=1, rule=Rule.WEIGHT_SUM):
    rows = np.array(rows, dtype=np.float32)
    spec = KernelSpec(rows.shape[1], rows.shape[0] // group, group, rule=rule)
    return encode_query(rows, statistics_of(exponents, means), scaling, spec)


def as_rows(query):
    return list(
        zip(query.exponents.tolist(), query.codes.tolist(), query.corrections.tolist(), strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([UNIT, 0.125, 1 / math.sqrt(80), 1e-3]))
def test_any_query_equals_the_scalar_restatement(data, scaling):
    channels = data.draw(st.integers(1, 5))
    row, cs, means = (
        data.draw(st.lists(each, min_size=channels, max_size=channels))
        for each in (
            FLOATS.filter(lambda x: abs(x) < 1e38),
            st.integers(-14, 16),
            st.integers(-LIMIT, LIMIT),
        )
    )
    assert as_rows(encode([row], cs, means, scaling)) == [scalar.query(row, cs, means, scaling)]


@pytest.mark.parametrize("group", [1, 3, 7])
def test_every_head_uses_its_kv_heads_statistics(group):
    rows = random_query(1, 3 * group, 16)
    generator = np.random.default_rng(2)
    cs, means = generator.integers(-5, 8, (3, 16)), generator.integers(-LIMIT, LIMIT, (3, 16))
    found = encode(rows, cs, means, 0.25, group)
    expected = [
        scalar.query(row, cs[h // group].tolist(), means[h // group].tolist(), 0.25)
        for h, row in enumerate(rows.tolist())
    ]
    assert as_rows(found) == expected
    assert (found.codes.dtype, found.exponents.dtype) == (np.int8, np.int8)
    assert found.corrections.dtype == np.int32
    twin = QueryCodes(found.codes, bit_flipped(found.exponents, 2, 0), found.corrections)
    assert as_rows(twin) != expected
    # The sign of a channel that counts.
    channel = int(np.abs(found.codes[0].astype(int)).argmax())
    twin = encode(bit_flipped(rows, (0, channel), 31), cs, means, 0.25, group)
    assert as_rows(twin)[0] != expected[0]
    assert as_rows(twin)[1:] == expected[1:]


@pytest.mark.parametrize("group", [2, 5])
def test_raw_sum_adds_the_queries_of_a_kv_head_first(group):
    rows = random_query(3, 2 * group, 16) * 1000
    cs, means = np.full((2, 16), 2), np.full((2, 16), 5000)
    found = encode(rows, cs, means, 0.25, group, Rule.RAW_SUM)
    sums = [scalar.group_sum(rows[g * group : (g + 1) * group].tolist()) for g in range(2)]
    expected = [
        scalar.query(s, cs[g].tolist(), means[g].tolist(), 0.25) for g, s in enumerate(sums)
    ]
    assert as_rows(found) == expected
    assert found.codes.shape == (2, 16)


def test_the_order_of_summed_heads_is_ascending():
    # 2^60 swallows the 1 in float64 unless it has been taken away before.
    big = 2.0**60
    assert encode([[big], [-big], [1.0]], [0], [0], UNIT, 3, Rule.RAW_SUM).codes.item() == 64
    assert encode([[1.0], [big], [-big]], [0], [0], UNIT, 3, Rule.RAW_SUM).codes.item() == 0
    # 2^30 would swallow it in float32, but not in float64.
    assert encode([[1.0], [2.0**30], [-(2.0**30)]], [0], [0], UNIT, 3, Rule.RAW_SUM).codes.item()


def test_the_factor_is_a_float64_product_rounded_once():
    # Queries whose scaled value lies at a power of two, where one unit of φ moves the exponent.
    seen = 0
    for head_dim in range(1, 257):
        scaling = head_dim**-0.5
        factor = np.float32(scaling * 1.4426950408889634)
        rounded_twice = np.float32(scaling) * np.float32(1.4426950408889634)
        near = np.float32(1) / factor
        for value in (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(2))):
            found = encode([[value]], [0], [0], scaling).exponents.item()
            assert found == np.frexp(value * factor)[1] - 7
            seen += found != np.frexp(value * rounded_twice)[1] - 7
    assert seen > 20


def test_a_zero_query():
    assert as_rows(encode([[0.0, -0.0]], [4, 16], [5, LIMIT])) == [(-7, [0, 0], 0)]


@pytest.mark.parametrize("power", [-140, -14, -1, 0, 1, 14, 100])
def test_exponent_at_powers_of_two(power):
    below = float(np.nextafter(np.float32(2.0**power), np.float32(0)))
    assert encode([[2.0**power]], [0], [0]).exponents.item() == max(power - 6, -128)
    assert encode([[below]], [0], [0]).exponents.item() == max(power - 7, -128)


def test_codes_round_half_to_even_and_never_reach_128():
    # 128 - 2^-16 rounds to 128 and is limited; -128 would not fit the hardware's products.
    found = encode([[127.99999, -127.99999, 0.5, 1.5, 2.5, -0.5, -1.5]], [0] * 7, [0] * 7)
    assert found.exponents.item() == 0
    assert found.codes.tolist() == [[127, -127, 0, 2, 2, 0, -2]]


def test_exponents_saturate():
    largest = float(np.finfo(np.float32).max)
    high = encode([[largest, 2.0**110]], [16, 16], [1, 0])
    assert (high.exponents.item(), high.codes.tolist()) == (127, [[127, 0]])
    low = encode([[2.0**-149, -(2.0**-149)]], [-14, 7], [0, 0])
    # 2^-142 in units of 2^-128.
    assert (low.exponents.item(), low.codes.tolist()) == (-128, [[0, 0]])


def test_subnormals_are_kept():
    found = encode([[2.0**-149, 2.0**-148]], [16, 16], [0, 0])
    # 2^-132 in units of 2^-128 would be 0; with s = -128 both round to 0 but are no zero query.
    assert found.exponents.item() == -128
    doubled = encode([[2.0**-130, 2.0**-128]], [16, 16], [0, 0])
    assert doubled.exponents.item() == -118
    assert doubled.codes.tolist() == [[16, 64]]


def test_correction_rounds_half_up():
    # codes 64 and 1: s = 0, ν = -6; 64·M + M' + 32 >> 6.
    for sigma in (31, 32, 33, -31, -32, -33, 95, 96, -95, -96, -97):
        found = encode([[64.0, 1.0]], [0, 0], [0, sigma])
        assert found.codes.tolist() == [[64, 1]]
        assert found.corrections.item() == (sigma + 32) >> 6


@pytest.mark.parametrize(
    ("power", "expected"), [(0, 1), (6, 64), (22, 2**22), (23, LIMIT), (30, LIMIT)]
)
def test_correction_saturates(power, expected):
    found = encode([[2.0**power]], [0], [64])
    assert found.exponents.item() == power - 6
    assert found.corrections.item() == expected
    assert encode([[-(2.0**power)]], [0], [64]).corrections.item() == -expected


def test_correction_is_exact_at_its_widest():
    # 256 channels of code 127 and the largest mean, Σ just below 2^38, and the largest shift.
    row, cs = [127.0] * 256, [0] * 256
    expected = scalar.query(row, cs, [LIMIT] * 256, UNIT)
    assert as_rows(encode([row], cs, [LIMIT] * 256)) == [expected]
    wide = [float(np.float32(127 * 2.0**30))] * 256
    assert encode([wide], cs, [LIMIT] * 256).corrections.item() == LIMIT


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_non_finite_query_is_refused(rule, bad):
    rows = random_query(4, 4, 8)
    rows[3, 7] = bad
    with pytest.raises(NonFiniteQueryError, match="query"):
        encode(rows, np.zeros((2, 8)), np.zeros((2, 8)), 0.1, 2, rule)
    rows[3, 7] = 0
    encode(rows, np.zeros((2, 8)), np.zeros((2, 8)), 0.1, 2, rule)


def test_a_query_that_overflows_when_scaled_is_refused():
    with pytest.raises(NonFiniteQueryError, match=r"scaled by 2\.0"):
        encode([[3e38]], [0], [0], 2.0)
    encode([[3e38]], [0], [0], 0.5)
    for scaling in (math.inf, math.nan, 1e300):
        with pytest.raises(NonFiniteQueryError):
            encode([[1.0]], [0], [0], scaling)


def test_a_sum_that_overflows_is_refused():
    rows = [[3e38], [3e38]]
    with pytest.raises(NonFiniteQueryError):
        encode(rows, [0], [0], 0.1, 2, Rule.RAW_SUM)
    encode(rows, [[0], [0]], [[0], [0]], 0.1, 1)


def test_wrong_calls_are_refused():
    spec = KernelSpec(8, 2, 3)
    statistics = statistics_of(np.zeros((2, 8)), np.zeros((2, 8)))
    with pytest.raises(ValueError, match="does not fit"):
        encode_query(random_query(5, 5, 8), statistics, 1.0, spec)
    with pytest.raises(ValueError, match="do not fit"):
        encode_query(random_query(5, 6, 8), statistics_of([[0]], [[0]]), 1.0, spec)
    codes, heads = np.full((1, 8), -128, dtype=np.int8), np.zeros(1, dtype=np.int8)
    with pytest.raises(ValueError, match="-128"):
        QueryCodes(codes, heads, heads.astype(np.int32))
    with pytest.raises(ValueError, match="int8, int8 and int32"):
        QueryCodes(codes, heads, heads)
    with pytest.raises(ValueError, match="shapes"):
        QueryCodes(np.zeros((2, 8), dtype=np.int8), heads, heads.astype(np.int32))
