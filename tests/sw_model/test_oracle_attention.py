# SPDX-License-Identifier: Apache-2.0
"""Attention over rows and codes against the oracle in exact fractions, and against float64."""

from fractions import Fraction

import numpy as np
import oracle_values
import pytest
from golden_inputs import statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, from_statistics

from hillinfer_model.coded_attention import (
    POWERS,
    CodedTokens,
    ExactRows,
    PartialSoftmax,
    attend,
    coded_block,
    exact_block,
    merge,
)
from hillinfer_model.floats import fused_multiply_add, inner_products
from hillinfer_model.key_codes import INVALID_EXPONENT, KeyCodes
from hillinfer_model.value_codes import decode_values


def fractions(array):
    """Return a nested list of fractions of an array of floats."""
    if array.ndim == 1:
        return [Fraction(float(value)) for value in array]
    return [fractions(row) for row in array]


def numbers(array):
    return [[float(value) for value in row] for row in array]


def to_floats(rows):
    return [[float(value) for value in row] for row in rows]


# Float32


FLOATS = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**40), max_value=2.0**40
)


@settings(max_examples=400, deadline=None)
@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_once(a, b, c):
    expected = oracle_values.fma(Fraction(a), Fraction(b), Fraction(c))
    arrays = [np.float32(value).reshape(1) for value in (a, b, c)]
    assert Fraction(float(fused_multiply_add(*arrays)[0])) == expected


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        # The product is 2^-24 + 2^-60: float64 loses its end, and then 1 + 2^-24 is a tie.
        (4097 * 2.0**-12, 16773121 * 2.0**-48, 1.0, 1 + 2.0**-23),
        # The product is 2^-24 - 2^-60.
        (1 + 2.0**-18, (1 - 2.0**-18) * 2.0**-24, 1 + 2.0**-23, 1 + 2.0**-23),
    ],
)
def test_fma_where_rounding_twice_would_differ(a, b, c, expected, sign):
    exact = oracle_values.fma(Fraction(a) * sign, Fraction(b), Fraction(c) * sign)
    assert exact == sign * Fraction(expected)
    arrays = [np.float32([value]) for value in (sign * a, b, sign * c)]
    assert Fraction(float(fused_multiply_add(*arrays)[0])) == exact
    twice = np.float32(np.float64(sign * a) * np.float64(b) + np.float64(sign * c))
    assert Fraction(float(twice)) != exact


@pytest.mark.parametrize("d", [1, 15, 16, 17, 64, 100])
def test_inner_products_in_sixteen_lanes(d):
    generator = np.random.default_rng(d)
    query = generator.normal(0, 3, (2, d)).astype(np.float32)
    keys = generator.normal(0, 3, (5, d)).astype(np.float16).astype(np.float32)
    found = inner_products(query, keys)
    expected = [[oracle_values.product(q, k) for k in fractions(keys)] for q in fractions(query)]
    assert fractions(found) == expected
    assert fractions(flipped(found, 3)) != expected


# Weights


def test_the_table_of_powers_is_the_nearest_integers():
    assert POWERS.tolist() == [oracle_values.step(i) for i in range(257)]


def block_alike(found, head, expected):
    reference, total, outputs = expected
    return (
        int(found.powers[head]) == reference
        and int(found.totals[head]) == total
        and fractions(found.outputs[head]) == outputs
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exact_blocks_of_any_products(data):
    tokens = data.draw(st.integers(1, 5))
    wide = st.floats(-33000, 33000, width=32) | st.floats(-30, 30, width=32)
    products = data.draw(st.lists(wide, min_size=tokens, max_size=tokens))
    values = data.draw(
        st.lists(
            st.integers(0, 0x7BFF) | st.integers(0x8000, 0xFBFF),
            min_size=2 * tokens,
            max_size=2 * tokens,
        )
    )
    rows = np.array(values, dtype=np.uint16).view(np.float16).astype(np.float32).reshape(tokens, 2)
    found = exact_block(np.float32([products]), rows)
    fixed = [oracle_values.fixed_product(Fraction(x)) for x in products]
    assert block_alike(found, 0, oracle_values.exact_block(fixed, fractions(rows)))


def one_head(codes, exponents, cells):
    """Return value codes and statistics of one KV head."""
    return (
        KeyCodes(codes[:, np.newaxis], exponents[:, np.newaxis]),
        statistics_of([c for c, _ in cells], [m for _, m in cells]),
    )


def coded_alike(aligned, codes, exponents, cells, golden_codes=None):
    golden = codes if golden_codes is None else golden_codes
    found = coded_block(aligned, *one_head(golden, exponents, cells))
    return all(
        block_alike(
            found,
            head,
            oracle_values.coded_block(
                [oracle_values.fixed_aligned(int(v)) for v in row],
                codes.tolist(),
                exponents.tolist(),
                cells,
            ),
        )
        for head, row in enumerate(aligned)
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_coded_blocks_of_any_codes(data):
    tokens = data.draw(st.integers(1, 6))
    near = st.integers(-3000, 3000) | st.integers(-(2**24), 2**24)

    def draw(each, count):
        return data.draw(st.lists(each, min_size=count, max_size=count))

    aligned = np.array(draw(near, 2 * tokens), dtype=np.int64).reshape(2, tokens)
    codes = np.array(draw(st.integers(-7, 7), 3 * tokens), dtype=np.int8).reshape(tokens, 3)
    exponents = np.array(draw(st.integers(0, 22), tokens), dtype=np.uint8)
    cells = draw(st.tuples(st.integers(-14, 16), st.integers(1 - 2**23, 2**23 - 1)), 3)
    assert coded_alike(aligned, codes, exponents, cells)


def test_a_full_block_of_largest_codes_stays_exact():
    codes = np.full((64, 2), 7, dtype=np.int8)
    codes[:, 1] = -7
    exponents = np.full(64, 9, dtype=np.uint8)
    aligned = np.zeros((1, 64), dtype=np.int64)
    aligned[0, 1] = -1
    cells = [(3, 5), (-1, -9)]
    assert coded_alike(aligned, codes, exponents, cells)
    assert not coded_alike(aligned, codes, exponents, cells, flipped(codes, 127))
    # One step below a power of two all addends are largest.
    exponents[:] = 0
    assert coded_alike(np.full((1, 64), -1), codes, exponents, cells)
    largest = oracle_values.round_half_up(Fraction(oracle_values.step(255), 2**9))
    assert largest == 32679
    assert 64 * 7 * largest < 2**24


@pytest.mark.parametrize("below", [39, 40, 41, 42])
def test_weights_end_forty_powers_below_the_largest(below):
    aligned = np.array([[0, -256 * below, -256 * below + 1]], dtype=np.int64)
    codes = np.array([[1], [7], [-7]], dtype=np.int8)
    for exponents in ([0, 22, 15], [22, 0, 1]):
        assert coded_alike(aligned, codes, np.array(exponents, np.uint8), [(2, 1000)])
    products = np.float32([[0, -below, -below + 0.01]])
    values = np.float32([[0], [65504], [65504]])
    found = exact_block(products, values)
    fixed = [oracle_values.fixed_product(v) for v in fractions(products)[0]]
    assert block_alike(found, 0, oracle_values.exact_block(fixed, fractions(values)))


@pytest.mark.parametrize("below", [0, 1, 39, 40, 41, 100])
def test_blocks_merge_by_powers_of_two(below):
    blocks = [
        (7 - below, 2**40 + 12345, [Fraction(3), Fraction(-65504)]),
        (7, 2**41 + 1, [Fraction(1, 3 * 2**0).limit_denominator(1) + 1, Fraction(5, 8)]),
    ]
    golden = [
        PartialSoftmax(
            np.array([reference]),
            np.array([total]),
            np.float32([to_floats([outputs])[0]]),
            np.zeros(1, dtype=np.bool_),
        )
        for reference, total, outputs in blocks
    ]
    assert fractions(merge(golden)) == [oracle_values.merge(blocks)]


# The whole


KV, GROUP, D = 2, 2, 20


def layer(seed, exact, coded):
    """Return q', rows and coded tokens of segments of the given sizes."""
    generator = np.random.default_rng(seed)

    def half(*shape, spread=1.0):
        values = generator.normal(0, spread, shape).astype(np.float16)
        return values.astype(np.float32)

    segments = [
        CodedTokens(
            generator.normal(0, 600, (KV * GROUP, tokens)).astype(np.int64),
            np.zeros((tokens, KV), dtype=np.bool_),
            KeyCodes(
                generator.integers(-7, 8, (tokens, KV, D), dtype=np.int8),
                generator.integers(6, 10, (tokens, KV), dtype=np.uint8),
            ),
            statistics_of(
                generator.integers(0, 4, (KV, D)), generator.integers(-900, 900, (KV, D))
            ),
        )
        for tokens in coded
    ]
    rows = ExactRows(half(exact, KV, D), half(exact, KV, D, spread=0.5))
    return generator.normal(0, 1, (KV * GROUP, D)).astype(np.float32), rows, segments


def oracle_outputs(scaled, rows, segments):
    outputs = []
    for h in range(len(scaled)):
        g = h // GROUP
        own = [
            (
                one.aligned[h].tolist(),
                one.values.codes[:, g].tolist(),
                one.values.exponents[:, g].tolist(),
                [from_statistics(one.statistics)[g, j] for j in range(D)],
            )
            for one in segments
        ]
        keys, values = fractions(rows.keys[:, g]), fractions(rows.values[:, g])
        outputs.append(oracle_values.attend(fractions(scaled[h]), keys, values, own))
    return outputs


@pytest.mark.parametrize(
    ("exact", "coded"),
    [(1, ()), (3, (2,)), (64, (64, 1)), (65, (63, 65, 2)), (2, (130,)), (0, (5,))],
)
def test_attention_is_the_oracles(exact, coded):
    scaled, rows, segments = layer(exact, exact, coded)
    found = attend(scaled, rows, segments)
    assert found.dtype == np.float32
    expected = oracle_outputs(scaled, rows, segments)
    assert fractions(found) == expected
    changed = fractions(attend(flipped(scaled, 3, 20), rows, segments))
    assert (changed == expected) == (exact == 0)


def test_attention_is_softmax_over_both_kinds():
    scaled, rows, segments = layer(9, 90, (150, 120))
    found = attend(scaled, rows, segments)
    for h in range(KV * GROUP):
        g = h // GROUP
        logs = np.concatenate(
            [rows.keys[:, g] @ scaled[h].astype(np.float64)]
            + [one.aligned[h] / 256 for one in segments]
        )
        values = np.concatenate(
            [rows.values[:, g].astype(np.float64)]
            + [decode_values(one.values, one.statistics)[:, g] for one in segments]
        )
        weights = np.exp2(logs - logs.max())
        expected = weights @ values / weights.sum()
        assert np.abs(found[h] - expected).max() < 1e-4 * np.abs(values).max()
        wrong = weights @ np.roll(values, 1, axis=0) / weights.sum()
        assert np.abs(found[h] - wrong).max() > 1e-3


def test_the_order_inside_a_coded_block_changes_no_bit():
    scaled, rows, segments = layer(4, 2, (60,))
    one = segments[0]
    order = np.random.default_rng(0).permutation(60)
    moved = CodedTokens(
        one.aligned[:, order],
        one.invalid_keys[order],
        KeyCodes(one.values.codes[order], one.values.exponents[order]),
        one.statistics,
    )
    found = attend(scaled, rows, segments)
    assert np.array_equal(found, attend(scaled, rows, [moved]))
    other = CodedTokens(one.aligned, one.invalid_keys, moved.values, one.statistics)
    assert not np.array_equal(found, attend(scaled, rows, [other]))


def test_invalid_tokens_break_the_heads_of_their_kv_head():
    scaled, rows, segments = layer(5, 3, (4, 3))
    assert np.isfinite(attend(scaled, rows, segments)).all()
    segments[1].values.exponents[2, 1] = INVALID_EXPONENT
    assert np.isnan(attend(scaled, rows, segments)).all(axis=1).tolist() == [False] * 2 + [True] * 2
    segments[0].invalid_keys[1, 0] = True
    assert np.isnan(attend(scaled, rows, segments)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_key_that_is_no_number_breaks_its_heads(value):
    scaled, rows, segments = layer(6, 3, (4,))
    rows.keys[1, 0, :2] = value, -value
    found = attend(scaled, rows, segments)
    broken = [bool(np.isnan(x)) for x in inner_products(scaled, rows.keys[:, 0])[:, 1]]
    assert np.isnan(found).any(axis=1).tolist() == [*broken[:2], False, False]


def test_attention_refuses_nothing_and_uneven_heads():
    scaled, rows, _ = layer(7, 0, ())
    with pytest.raises(ValueError, match="needs a token"):
        attend(scaled, rows, [])
    with pytest.raises(ValueError, match="evenly"):
        attend(scaled[:3], rows, [])
