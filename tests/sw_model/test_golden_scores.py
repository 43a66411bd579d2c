# SPDX-License-Identifier: Apache-2.0
import golden_scalar as scalar
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.scores import aligned_products, mag, score_codes, weight

# (head_dim, kv_heads, group_size)
SHAPES = [(1, 1, 1), (10, 3, 3), (16, 2, 5), (64, 1, 7), (80, 3, 1), (256, 2, 3), (64, 40, 1)]


def random_query_codes(seed, spec, low=-20, high=20):
    generator = np.random.default_rng(seed)
    heads = spec.scored_heads
    return QueryCodes(
        generator.integers(-127, 128, (heads, spec.head_dim), dtype=np.int8),
        generator.integers(low, high, heads).astype(np.int8),
        generator.integers(-(2**23) + 1, 2**23, heads).astype(np.int32),
    )


def scalar_aligned(query, keys, spec):
    group = spec.scored_heads // spec.kv_heads
    return [
        [
            scalar.aligned(
                (int(query.exponents[h]), query.codes[h].tolist(), int(query.corrections[h])),
                (int(keys.exponents[p, h // group]), keys.codes[p, h // group].tolist()),
                spec.key_mode.value,
            )
            for p in range(keys.codes.shape[0])
        ]
        for h in range(spec.scored_heads)
    ]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("shape", SHAPES)
def test_aligned_products_equal_the_scalar_restatement(shape, mode, rule):
    spec = KernelSpec(*shape, key_mode=mode, rule=rule)
    query, keys = random_query_codes(1, spec), random_codes(2, 9, spec)
    found = aligned_products(query, keys, spec)
    expected = scalar_aligned(query, keys, spec)
    assert found.dtype == np.int64
    assert found.tolist() == expected


@pytest.mark.parametrize("bit", [0, 3])
def test_twin_a_flipped_exponent_bit_is_seen(bit):
    spec = KernelSpec(16, 2, 2, key_mode=KeyMode.INT8)
    query = random_query_codes(3, spec, low=0, high=1)
    keys = KeyCodes(random_codes(4, 5, spec).codes, np.full((5, 2), 6, dtype=np.uint8))
    whole = aligned_products(query, keys, spec)
    other = KeyCodes(keys.codes, bit_flipped(keys.exponents, (2, 0), bit))
    changed = aligned_products(query, other, spec) != whole
    assert changed[:2, 2].all()
    changed[:2, 2] = False
    assert not changed.any()


def test_twin_a_flipped_code_bit_is_seen():
    spec = KernelSpec(16, 2, 2, key_mode=KeyMode.INT8)
    query = random_query_codes(3, spec, low=0, high=1)
    keys = KeyCodes(random_codes(4, 5, spec).codes, np.full((5, 2), 6, dtype=np.uint8))
    whole = aligned_products(query, keys, spec)
    other = KeyCodes(bit_flipped(keys.codes, (3, 1, 9), 0), keys.exponents)
    changed = aligned_products(query, other, spec) != whole
    assert changed.any(axis=0).tolist() == [False, False, False, True, False]
    assert changed[:, 3].tolist() == [False, False, True, True]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("mode", "code"), [("int8", 127), ("int4", 7), ("int2", 1), ("int2", -2)])
def test_the_largest_products_are_exact(mode, code, sign):
    # 256 equal products; with 2^24 as the bound of float32's integers none may be lost.
    spec = KernelSpec(256, 1, 1, key_mode=KeyMode(mode))
    query = QueryCodes(
        np.full((1, 256), 127 * sign, dtype=np.int8),
        np.zeros(1, dtype=np.int8),
        np.zeros(1, dtype=np.int32),
    )
    keys = KeyCodes(np.full((1, 1, 256), code, dtype=np.int8), np.full((1, 1), 6, dtype=np.uint8))
    value = 2 * code + 1 if mode == "int2" else code
    # s + t - 6 = 0: no shift.
    assert aligned_products(query, keys, spec).item() == 127 * sign * value * 256


@settings(max_examples=200, deadline=None)
@given(st.integers(-127, 127), st.integers(-127, 127), st.integers(-128, 127), st.integers(0, 255))
def test_alignment_at_any_exponents(q, k, s, t):
    spec = KernelSpec(1, 1, 1, key_mode=KeyMode.INT8)
    query = QueryCodes(
        np.array([[q]], dtype=np.int8), np.array([s], dtype=np.int8), np.array([5], dtype=np.int32)
    )
    keys = KeyCodes(np.array([[[k]]], dtype=np.int8), np.array([[t]], dtype=np.uint8))
    found = aligned_products(query, keys, spec).item()
    assert found == scalar.aligned((s, [q], 5), (t, [k]), "int8")
    assert abs(found) < 2**24


def test_aligned_products_of_no_tokens():
    spec = KernelSpec(16, 2, 3)
    assert aligned_products(random_query_codes(1, spec), random_codes(1, 0, spec), spec).shape == (
        6,
        0,
    )


def test_weight_at_every_step():
    values = [*range(-(2**14), 2**13), -(2**25), 2**25, -(2**24), 2**24]
    found = weight(np.array(values, dtype=np.int64))
    assert found.tolist() == [scalar.weight(value) for value in values]
    assert np.all(np.diff(found[: 2**14 + 2**13]) >= 0)
    assert weight(np.array([0, 256, 6143, 6144, -6144, -6145])).tolist() == [
        2**24, 2**25, 511 << 39, 2**48 - 1, 1, 0,
    ]  # fmt: skip


def test_mag_is_monotone_and_truncates():
    dense = mag(np.arange(2**20, dtype=np.int64))
    steps = np.diff(dense)
    assert set(steps.tolist()) == {0, 1}
    assert np.array_equal(dense[:2048], np.arange(2048))
    edges = sorted({2**k + d for k in range(10, 49) for d in range(-3, 4) if 2**k + d < 2**48})
    found = mag(np.array(edges, dtype=np.int64))
    assert found.tolist() == [scalar.mag(value) for value in edges]
    assert np.all(np.diff(found) >= 0)
    assert found[-1] == 39935


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**48 - 1), st.integers(0, 2**48 - 1))
def test_mag_never_contradicts_the_order(one, other):
    codes = mag(np.array([one, other]))
    assert codes.tolist() == [scalar.mag(one), scalar.mag(other)]
    if one <= other:
        assert codes[0] <= codes[1]
    # Ten fraction bits: what differs by more than a thousandth is told apart.
    if one > other + (other >> 10) + 1:
        assert codes[0] > codes[1]


def scalar_codes(aligned, offsets, invalid, spec, scope):
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    heads, kv_heads = spec.scored_heads // sets, spec.kv_heads // sets
    result = []
    for index in range(sets):
        rows = range(index * heads, (index + 1) * heads)
        row = []
        for p in range(aligned.shape[1]):
            if spec.rule is Rule.WEIGHT_SUM:
                weights = [scalar.weight(int(aligned[h, p] - offsets[h])) for h in rows]
                code = scalar.weight_code(weights)
            else:
                value = sum(int(aligned[h, p]) for h in rows) - int(offsets[index])
                code = scalar.raw_code(value)
            bad = invalid[p, index * kv_heads : (index + 1) * kv_heads].any()
            row.append(0 if bad else code)
        result.append(row)
    return result


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("span", [200, 5000, 2**24 - 1])
@pytest.mark.parametrize("shape", [(16, 1, 1), (16, 3, 5), (16, 40, 2), (16, 64, 1)])
def test_score_codes_equal_the_scalar_restatement(shape, span, rule, scope):
    spec = KernelSpec(*shape, rule=rule)
    generator = np.random.default_rng(span)
    aligned = generator.integers(-span, span + 1, (spec.scored_heads, 50))
    if rule is Rule.WEIGHT_SUM:
        offsets = generator.integers(-span, span + 1, spec.scored_heads)
    else:
        sets = 1 if scope is Scope.LAYER else spec.kv_heads
        offsets = generator.integers(-span, span + 1, sets)
    invalid = generator.random((50, spec.kv_heads)) < 0.2 / spec.kv_heads
    found = score_codes(aligned, offsets, invalid, spec, scope)
    expected = scalar_codes(aligned, offsets, invalid, spec, scope)
    assert found.dtype == np.uint16
    assert found.tolist() == expected
    healthy = int(np.flatnonzero(~invalid.any(axis=1))[0])
    invalid[healthy, 0] = True
    twin = score_codes(aligned, offsets, invalid, spec, scope).tolist()
    assert expected[0][healthy] != 0 == twin[0][healthy]
    assert twin[0][healthy + 1 :] == expected[0][healthy + 1 :]


def test_raw_sum_at_the_ends_of_int32():
    spec = KernelSpec(16, 64, 1, rule=Rule.RAW_SUM)
    end = 2**24 - 1
    aligned = np.array([[end, -end, 0]] * 64, dtype=np.int64)
    valid = np.zeros((3, 64), dtype=np.bool_)
    found = score_codes(aligned, np.array([64 * -end]), valid, spec, Scope.LAYER)
    assert 128 * end < 2**31
    expected = [scalar.raw_code(value) for value in (128 * end, 0, 64 * end)]
    assert found[0].tolist() == expected


def test_raw_sum_is_monotone_across_zero():
    spec = KernelSpec(16, 1, 1, rule=Rule.RAW_SUM)
    aligned = np.arange(-5000, 5000, dtype=np.int64)[np.newaxis]
    valid = np.zeros((10_000, 1), dtype=np.bool_)
    found = score_codes(aligned, np.array([0]), valid, spec, Scope.LAYER)[0].astype(np.int64)
    assert set(np.diff(found).tolist()) == {0, 1}
    assert (found[4999], found[5000]) == (32767, 32768)


def test_weight_sum_ranks_large_sums():
    # Sums of 4,096 heads up to the limit: never an inversion, and the limit is the top.
    spec = KernelSpec(16, 64, 64)
    levels = np.arange(-2000, 7000, 50, dtype=np.int64)
    aligned = np.repeat(levels[np.newaxis], spec.scored_heads, axis=0)
    valid = np.zeros((levels.size, 64), dtype=np.bool_)
    offsets = np.zeros(spec.scored_heads, dtype=np.int64)
    layer = score_codes(aligned, offsets, valid, spec, Scope.LAYER)[0].astype(np.int64)
    assert np.all(np.diff(layer) >= 0)
    exact = [min(4096 * scalar.weight(int(z)), 2**48 - 1) for z in levels]
    assert layer.tolist() == [1 + scalar.mag(value) for value in exact]
    assert layer[-1] == 39936
    # Below the limit each step of 50/256 octaves is told apart.
    below = np.array(exact) < 2**48 - 1
    assert np.all(np.diff(layer[below]) > 0)
    assert below.any()
    assert not below.all()


def test_every_token_valid_is_above_every_invalid_one():
    spec = KernelSpec(16, 1, 1)
    aligned = np.array([[-(2**24) + 1, 2**24 - 1]])
    invalid = np.array([[False], [True]])
    found = score_codes(aligned, np.array([2**24 - 1]), invalid, spec, Scope.LAYER)
    assert found.tolist() == [[1, 0]]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("scope", "sets"), [(Scope.LAYER, 1), (Scope.KV_HEAD, 2)])
def test_score_codes_of_no_tokens(rule, scope, sets):
    spec = KernelSpec(16, 2, 3, rule=rule)
    offsets = np.zeros(spec.scored_heads if rule is Rule.WEIGHT_SUM else sets, dtype=np.int64)
    found = score_codes(
        np.zeros((spec.scored_heads, 0), dtype=np.int64),
        offsets,
        np.zeros((0, 2), dtype=np.bool_),
        spec,
        scope,
    )
    assert found.shape == (sets, 0)
    assert found.dtype == np.uint16


def test_wrong_calls_are_refused():
    spec = KernelSpec(16, 2, 3)
    query, keys = random_query_codes(1, spec), random_codes(1, 4, spec)
    other = KernelSpec(16, 3, 2)
    with pytest.raises(ValueError, match="key codes"):
        aligned_products(query, keys, other)
    with pytest.raises(ValueError, match="query codes"):
        aligned_products(query, keys, KernelSpec(16, 2, 2))
    aligned, invalid = np.zeros((6, 4), dtype=np.int64), np.zeros((4, 2), dtype=np.bool_)
    with pytest.raises(ValueError, match="offsets"):
        score_codes(aligned, np.zeros(1, dtype=np.int64), invalid, spec, Scope.LAYER)
    with pytest.raises(ValueError, match="invalid marks"):
        score_codes(aligned, np.zeros(6, dtype=np.int64), invalid.T, spec, Scope.LAYER)
    with pytest.raises(ValueError, match="aligned products"):
        score_codes(aligned[:5], np.zeros(6, dtype=np.int64), invalid, spec, Scope.LAYER)
