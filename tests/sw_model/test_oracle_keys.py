# SPDX-License-Identifier: Apache-2.0
"""The golden model's key path against the oracle, at every boundary of the contract page."""

from fractions import Fraction

import numpy as np
import oracle_keys
import oracle_numbers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, from_statistics, halves, same, to_statistics

from hillinfer_model import fp16
from hillinfer_model.choices import KeyMode
from hillinfer_model.key_codes import encode_keys
from hillinfer_model.statistics import segment_statistics

LIMIT = 2**23 - 1
MODES = list(KeyMode)
INF, NAN, LARGEST = 0x7C00, 0x7E00, 0x7BFF
EDGE_FRACTIONS = (0, 1, 511, 512, 1023)
# Every exponent with the fractions at its ends and middle, both signs; inf among them, no NaN.
EDGE_CODES = np.array(
    [s | e << 10 | f for s in (0, 0x8000) for e in range(31) for f in EDGE_FRACTIONS]
    + [INF, 0xFC00],
    dtype=np.uint16,
)


# FP16


def decodes_alike(given_codes, golden_codes):
    parts = fp16.decode(golden_codes)
    for i, code in enumerate(given_codes.tolist()):
        value = oracle_numbers.fp16_value(code)
        if bool(parts.is_nan[i]) != (value is None):
            return False
        m = int(parts.magnitude[i]) * int(parts.sign[i])
        if m * oracle_numbers.power(int(parts.exponent[i]) - 25) != (value or 0):
            return False
    return True


def test_decode_every_code():
    codes = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    assert decodes_alike(codes, codes)


@pytest.mark.parametrize("code", [0, 1, 0x03FF, 0x0400, 0x3C00, LARGEST, 0xFBFE])
@pytest.mark.parametrize("bit", range(15))
def test_decode_notices_a_flipped_bit(code, bit):
    codes = np.array([code], dtype=np.uint16)
    assert not decodes_alike(codes, flipped(codes, bit=bit))


def test_the_oracle_reads_fp16_as_numpy_does():
    codes = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for code, value in zip(codes.tolist(), codes.view(np.float16).tolist(), strict=True):
        if abs(value) < float("inf"):
            assert oracle_numbers.fp16_value(code) == Fraction(value)


# Channel statistics


def statistics_alike(keys, first, segment, preceding, golden_keys=None):
    kv, d = keys.shape[1:]
    before = None if preceding is None else to_statistics(preceding, kv, d)
    found = segment_statistics(keys if golden_keys is None else golden_keys, first, segment, before)
    expected = to_statistics(
        oracle_keys.statistics(keys.tolist(), first, segment, preceding), kv, d
    )
    return same(found.exponents, np.int8, expected.exponents.tolist()) and same(
        found.means, np.int32, expected.means.tolist()
    )


def channels(columns, first):
    """Return keys of one KV head from columns of FP16 codes, behind loud sinks if first is 0."""
    body = np.array(columns, dtype=np.uint16).T[:, None, :]
    if first:
        return np.ascontiguousarray(body)
    return np.concatenate([np.full((4, 1, body.shape[2]), LARGEST, np.uint16), body])


def two_valued(value, other, count=32):
    half = count // 2
    return halves([value] * half + [other] * half).tolist()


POWERS = [2.0**k for k in range(-24, 16)]
SPREAD_COLUMNS = [
    two_valued(v, -v)
    for power in POWERS
    for v in (power, np.nextafter(np.float16(power), np.float16(0)))
]
CONSTANT_COLUMNS = [two_valued(v, v) for v in (*POWERS, 65504, 3.0, 0)]
# Sums of 16 and 48 smallest steps over 32 tokens: means of 0.5, 1.5 and their negatives.
MEAN_TIES = [
    [sign | 1] * ones + [sign | 3] * threes + [0] * (32 - ones - threes)
    for sign in (0, 0x8000)
    for ones, threes in ((16, 0), (0, 16), (15, 0), (17, 0), (4, 4), (5, 4))
]
UNIT_TIES = [
    [0] * 31 + halves([sign * v]).tolist()
    for sign in (1, -1)
    for v in (65504, 65440, 65472, 65376, 2047, 2045)
]
ODD_ONES = [
    [INF] * 32,
    [0xFC00] * 32,
    [INF, 0xFC00] * 16,
    [LARGEST, 0xFBFF] * 16,
    [NAN] * 32,
    [NAN, 0x3C00] * 16,
    [NAN] + [INF] * 31,
    [0x8000] * 32,
    [0x03FF, 0x8001] * 16,
]


@pytest.mark.parametrize("first", [0, 1024])
@pytest.mark.parametrize(
    "columns", [SPREAD_COLUMNS, CONSTANT_COLUMNS, MEAN_TIES, UNIT_TIES, ODD_ONES]
)
def test_statistics_at_boundaries(first, columns):
    # A later segment needs half its length; the columns repeat to 512 tokens there.
    keys = channels([column * (1 if first == 0 else 16) for column in columns], first)
    before = {(0, j): (1, 1) for j in range(len(columns))} if first else None
    assert statistics_alike(keys, first, 1024, before)


def test_statistics_reach_both_ends_of_c():
    table = oracle_keys.statistics(
        channels([*SPREAD_COLUMNS, [LARGEST, 0xFBFF] * 16], 0).tolist(), 0, 1024, None
    )
    assert {c for c, _ in table.values()} >= {-14, -13, 15, 16}


def test_statistics_of_a_rare_peak():
    # Only in a long segment can one peak outweigh the mean deviation.
    column = [LARGEST] + [0x0001] * 32767
    keys = channels([column], 65536)
    assert statistics_alike(keys, 65536, 65536, {(0, 0): (0, 0)})
    table = oracle_keys.statistics(keys.tolist(), 65536, 65536, {})
    assert table[0, 0][0] == 7
    assert not statistics_alike(
        keys, 65536, 65536, {(0, 0): (0, 0)}, golden_keys=flipped(keys, 0, 10)
    )


def random_keys(seed, shape, scale=1.0):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * scale + 1).astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 35, 36, 37, 300])
def test_statistics_of_a_short_first_segment(tokens):
    keys = random_keys(tokens, (tokens, 2, 3))
    assert statistics_alike(keys, 0, 1024, None)
    own = oracle_keys.statistics(keys.tolist(), 0, 1024, None) != {
        (g, j): (4, 0) for g in range(2) for j in range(3)
    }
    assert own == (tokens - 4 >= 32)


@pytest.mark.parametrize(
    ("segment", "tokens"),
    [(1024, 1), (1024, 511), (1024, 512), (1024, 513), (512, 255), (512, 256)],
)
def test_statistics_of_a_short_later_segment(segment, tokens):
    keys = random_keys(tokens, (tokens, 1, 2))
    before = {(0, 0): (-3, 17), (0, 1): (9, -LIMIT)}
    assert statistics_alike(keys, 2 * segment, segment, before)
    inherited = oracle_keys.statistics(keys.tolist(), 2 * segment, segment, before) == before
    assert inherited == (2 * tokens < segment)


def test_statistics_leave_the_sinks_out_and_nothing_else():
    keys = random_keys(1, (40, 1, 2))
    loud = keys.copy()
    loud[:4] = LARGEST
    assert statistics_alike(keys, 0, 1024, None, golden_keys=loud)
    loud[4] = LARGEST
    assert not statistics_alike(keys, 0, 1024, None, golden_keys=loud)


@pytest.mark.parametrize("bit", [9, 10, 14, 15])
def test_statistics_notice_a_flipped_bit(bit):
    keys = random_keys(2, (36, 1, 1))
    assert statistics_alike(keys, 0, 1024, None)
    assert not statistics_alike(keys, 0, 1024, None, golden_keys=flipped(keys, 20, bit))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_statistics_of_any_codes(data):
    tokens = data.draw(st.integers(36, 48))
    codes = st.lists(st.integers(0, 65535), min_size=tokens * 2, max_size=tokens * 2)
    keys = np.array(data.draw(codes), dtype=np.uint16).reshape(tokens, 1, 2)
    assert statistics_alike(keys, 0, 512, None)


# Centring, token exponent and codes


def codes_alike(keys, statistics, mode, golden_keys=None):
    found = encode_keys(keys if golden_keys is None else golden_keys, statistics, mode)
    table = from_statistics(statistics)
    expected = [oracle_keys.encode(token, table, mode.value) for token in keys.tolist()]
    return same(found.exponents, np.uint8, [t for t, _ in expected]) and same(
        found.codes, np.int8, [codes for _, codes in expected]
    )


def heads(cells):
    """Return statistics with one KV head per row of (c, M) cells."""
    table = {(g, j): cell for g, row in enumerate(cells) for j, cell in enumerate(row)}
    return to_statistics(table, len(cells), len(cells[0]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("c", [-14, -13, -1, 4, 15, 16])
def test_centring_at_every_exponent(mode, c):
    # One channel a head, so that every head's D decides its own t.
    means = (0, 1, -1, LIMIT, -LIMIT, 1 << 22, -(1 << 10))
    statistics = heads([[(c, mean)] for mean in means])
    keys = np.repeat(EDGE_CODES[:, None], len(means), axis=1)[:, :, None]
    assert codes_alike(keys, statistics, mode)


def differences(rows):
    """Return zero keys and statistics whose D are the rows, up to 2^23 - 1 in size."""
    statistics = heads([[(4, -difference) for difference in row] for row in rows])
    return np.zeros((1, len(rows), len(rows[0])), dtype=np.uint16), statistics


def chunks(rows):
    return [rows[i : i + 64] for i in range(0, len(rows), 64)]


@pytest.mark.parametrize("mode", MODES)
def test_codes_of_every_small_difference(mode):
    for rows in chunks([[difference] for difference in range(-400, 401)]):
        assert codes_alike(*differences(rows), mode)


@pytest.mark.parametrize("mode", MODES)
def test_codes_where_l_steps(mode):
    powers = [2**p for p in range(1, 24)]
    peaks = sorted({p + k for p in powers for k in (-1, 0, 1) if p + k <= LIMIT})
    rows = [[sign * peak, peak // 3] for peak in peaks for sign in (1, -1)]
    for part in chunks(rows):
        assert codes_alike(*differences(part), mode)
    lengths = {oracle_numbers.bl(peak) for peak in peaks}
    assert lengths == set(range(1, 24))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [4, 8, 9, 17, 23])
def test_codes_at_thresholds_and_ties(mode, p):
    # The peak fixes t; the other channel visits every half step, and one beside it.
    peak = 2**p - 1
    step = 2 ** max(p - 8, 0)
    others = [k * step + e for k in range(-40, 41) for e in (-1, 0, 1)]
    others += [k * 2 ** (p - 2) + e for k in range(-4, 5) for e in (-1, 0, 1)]
    rows = [[peak, other] for other in others if abs(other) <= peak]
    for part in chunks(rows):
        assert codes_alike(*differences(part), mode)


@pytest.mark.parametrize("mode", MODES)
def test_codes_of_the_largest_differences(mode):
    statistics = heads([[(-14, -LIMIT), (-14, LIMIT)], [(-14, LIMIT), (-14, LIMIT)]])
    keys = np.array([[[LARGEST, 0xFBFF]] * 2, [[0xFC00, INF]] * 2, [[0, 0]] * 2], dtype=np.uint16)
    assert codes_alike(keys, statistics, mode)
    assert encode_keys(keys, statistics, mode).exponents[0, 0] == (
        21 if mode in (KeyMode.INT4, KeyMode.INT2) else 17
    )


@pytest.mark.parametrize("mode", MODES)
def test_codes_of_invalid_tokens(mode):
    keys = random_keys(3, (6, 2, 3))
    keys[1, 0, 2] = NAN
    keys[2, 1, 0] = 0xFFFF
    keys[3] = 0x7C01
    keys[4, 0, 0] = INF
    statistics = heads([[(3, 5), (0, -9), (4, 0)], [(1, 2), (3, 4), (5, 6)]])
    assert codes_alike(keys, statistics, mode)
    exponents = encode_keys(keys, statistics, mode).exponents
    assert (exponents == 255).tolist() == [
        [False, False],
        [True, False],
        [False, True],
        [True, True],
        [False, False],
        [False, False],
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bit", [13, 14, 15])
def test_codes_notice_a_flipped_bit(mode, bit):
    keys = np.full((1, 1, 2), 0x3C00, dtype=np.uint16)
    statistics = heads([[(4, 0), (4, 100)]])
    assert codes_alike(keys, statistics, mode)
    assert not codes_alike(keys, statistics, mode, golden_keys=flipped(keys, 0, bit))


@pytest.mark.parametrize("mode", MODES)
def test_codes_notice_a_mean_that_is_one_off(mode):
    # D = 2^k decides between two token exponents: one unit less changes t.
    keys, statistics = differences([[1 << 12]])
    other = differences([[(1 << 12) - 1]])[1]
    assert codes_alike(keys, statistics, mode)
    found, moved = (encode_keys(keys, s, mode).exponents for s in (statistics, other))
    assert found != moved


def test_fp16_mode_makes_int8_codes():
    keys, statistics = random_keys(4, (8, 1, 2)), heads([[(2, 3), (1, 9)]])
    cast, stored = (encode_keys(keys, statistics, m) for m in (KeyMode.FP16, KeyMode.INT8))
    assert np.array_equal(cast.codes, stored.codes)
    assert np.array_equal(cast.exponents, stored.exponents)
    assert not np.array_equal(cast.codes, flipped(stored.codes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_codes_of_any_key(data):
    kv, d = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    cell = st.tuples(st.integers(-14, 16), st.integers(-LIMIT, LIMIT))
    row = st.lists(cell, min_size=d, max_size=d)
    statistics = heads(data.draw(st.lists(row, min_size=kv, max_size=kv)))
    size = 3 * kv * d
    codes = data.draw(st.lists(st.integers(0, 65535), min_size=size, max_size=size))
    keys = np.array(codes, dtype=np.uint16).reshape(3, kv, d)
    assert codes_alike(keys, statistics, data.draw(st.sampled_from(MODES)))
