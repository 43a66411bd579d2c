# SPDX-License-Identifier: Apache-2.0
"""The golden model's offsets, weights and score codes against the oracle."""

import numpy as np
import oracle_scores
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, same
from pairwise import pairwise

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import offsets, reference_positions
from hillinfer_model.scores import mag, score_codes, weight

L_LIMIT = 2**24 - 2
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 36, 255, 256, 257, 259, 260, 261, 272, 273, 288, 289, 305]
KINDS = [(rule, scope) for rule in Rule for scope in Scope]


def spec_of(rule, kv=1, group=1):
    return KernelSpec(1, kv, group, rule=rule)


def valid(tokens, kv=1):
    return np.zeros((tokens, kv), dtype=bool)


# Positions


@pytest.mark.parametrize("length", LENGTHS)
def test_reference_positions(length):
    recent, probes = reference_positions(length)
    expected = oracle_scores.reference_positions(length)
    assert same(recent, np.int64, expected[0])
    assert same(probes, np.int64, expected[1])
    assert not same(flipped(recent), np.int64, expected[0])


def test_predicted_positions_are_left_out_of_the_same_sets():
    for length in (1, 5, 273, 300):
        recent, probes = oracle_scores.reference_positions(length)
        left = oracle_scores.reference_positions(length, [length - 1])
        assert left == ([p for p in recent if p != length - 1], probes)
        found = [list(map(int, own)) for own in reference_positions(length - 1, 1)]
        assert found == [list(own) for own in left]


# Weights and short codes


EDGES = [i * 256 + f for i in (-26, -25, -24, -18, -17, -16, -15, -1, 0, 1, 23, 24, 25) for f in
         (0, 1, 127, 128, 254, 255)] + [2**24, -(2**24), 2**26, -(2**26)]  # fmt: skip


def test_weight_at_boundaries():
    found = weight(np.array(EDGES, dtype=np.int64))
    expected = [oracle_scores.weight(z) for z in EDGES]
    assert same(found, np.int64, expected)
    assert not same(weight(np.array(EDGES, dtype=np.int64) + 1), np.int64, expected)
    assert not same(flipped(found), np.int64, expected)


def test_weight_grows_with_z_and_is_one_at_zero():
    weights = [oracle_scores.weight(z) for z in range(-26 * 256, 25 * 256)]
    assert weights == sorted(weights)
    assert oracle_scores.weight(0) == 2**24


def powers(top):
    return sorted({max(2**p + k, 0) for p in range(top) for k in (-1, 0, 1, 2, 3)})


def test_mag_at_boundaries():
    values = [*powers(48), *range(1000, 1060), 3 << 40, 2**48 - 2**36, 2**48 - 1]
    values = [v for v in values if v < 2**48]
    found = mag(np.array(values, dtype=np.int64))
    expected = [oracle_scores.mag(v) for v in values]
    assert same(found, np.int64, expected)
    ordered = [oracle_scores.mag(v) for v in sorted(values)]
    assert ordered == sorted(ordered)
    assert not same(flipped(found), np.int64, expected)


# Offsets


def offsets_alike(aligned, invalid, rule, scope, kv, group, golden_aligned=None):
    found = offsets(
        aligned if golden_aligned is None else golden_aligned,
        invalid,
        spec_of(rule, kv, group),
        scope,
    )
    expected = oracle_scores.offsets(
        aligned.tolist(), invalid.tolist(), rule.value, scope.value, group
    )
    return same(found, np.int64, expected)


def any_aligned(seed, heads, tokens, spread):
    generator = np.random.default_rng(seed)
    return generator.integers(-spread, spread + 1, (heads, tokens), dtype=np.int64)


@pytest.mark.parametrize(
    ("length", "kind", "spread"), pairwise([LENGTHS, KINDS, [0, 40, 3000, L_LIMIT]])
)
def test_offsets_of_every_length(length, kind, spread):
    rule, scope = kind
    heads = 4 if rule is Rule.WEIGHT_SUM else 2
    aligned = any_aligned(length, heads, length, spread)
    assert offsets_alike(aligned, valid(length, 2), rule, scope, 2, 2)


@pytest.mark.parametrize(("rule", "scope"), KINDS)
@pytest.mark.parametrize(
    "pattern", ["all", "one head", "R", "Φ", "no reference", "all but one probe", "random"]
)
def test_offsets_leave_invalid_tokens_out(rule, scope, pattern):
    length = 330
    recent, probes = oracle_scores.reference_positions(length)
    invalid = valid(length, 2)
    if pattern == "all":
        invalid[:] = True
    elif pattern == "one head":
        invalid[:, 1] = True
    elif pattern == "R":
        invalid[recent, 0] = True
    elif pattern == "Φ":
        invalid[probes] = True
    elif pattern == "no reference":
        invalid[recent + probes] = True
    elif pattern == "all but one probe":
        invalid[recent + probes[1:]] = True
    else:
        invalid = np.random.default_rng(8).random((length, 2)) < 0.5
    heads = 4 if rule is Rule.WEIGHT_SUM else 2
    aligned = any_aligned(9, heads, length, 900)
    assert offsets_alike(aligned, invalid, rule, scope, 2, 2)
    found = offsets(aligned, invalid, spec_of(rule, 2, 2), scope)
    if pattern in ("all", "no reference"):
        assert not found.any()
    if pattern == "all but one probe" and rule is Rule.WEIGHT_SUM:
        assert found.tolist() == (aligned[:, probes[0]] + 1024).tolist()


def test_an_invalid_tokens_value_does_not_matter():
    aligned = any_aligned(10, 2, 300, 900)
    invalid = valid(300)
    invalid[[2, 16, 299]] = True
    moved = aligned.copy()
    moved[:, [2, 16, 299]] += 5000
    assert offsets_alike(aligned, invalid, Rule.WEIGHT_SUM, Scope.LAYER, 1, 2, moved)
    moved[:, 3] += 5000
    assert not offsets_alike(aligned, invalid, Rule.WEIGHT_SUM, Scope.LAYER, 1, 2, moved)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 255, 256])
@pytest.mark.parametrize("step", [0, 1, 255, 256])
def test_offset_where_w_crosses_a_power_of_two(tokens, step):
    # Equal values make W a multiple of 2^24; one token lower by a step lies beside it.
    aligned = np.full((1, tokens), 77, dtype=np.int64)
    aligned[0, -1] -= step
    assert offsets_alike(aligned, valid(tokens), Rule.WEIGHT_SUM, Scope.LAYER, 1, 1)


@pytest.mark.parametrize("low", [-(24 * 256), -(24 * 256) - 1, -(16 * 256), -(25 * 256), -L_LIMIT])
def test_offset_with_terms_that_vanish(low):
    aligned = np.full((1, 300), low, dtype=np.int64)
    aligned[0, 299] = 0
    assert offsets_alike(aligned, valid(300), Rule.WEIGHT_SUM, Scope.KV_HEAD, 1, 1)


@pytest.mark.parametrize("total", range(-9, 10))
def test_raw_offset_rounds_down(total):
    aligned = np.array([[total, 0, 0, 0]], dtype=np.int64)
    assert offsets_alike(aligned, valid(4), Rule.RAW_SUM, Scope.LAYER, 1, 1)


@pytest.mark.parametrize(("rule", "scope"), KINDS)
@pytest.mark.parametrize("index", [0, 3, 16, 32, 44, 299])
def test_offsets_notice_a_flipped_bit_of_a_reference(rule, scope, index):
    aligned = any_aligned(11, 1, 300, 300)
    wrong = flipped(aligned, index, 14)
    assert offsets_alike(aligned, valid(300), rule, scope, 1, 1)
    assert not offsets_alike(aligned, valid(300), rule, scope, 1, 1, wrong)
    assert offsets_alike(aligned, valid(300), rule, scope, 1, 1, flipped(aligned, 5, 14))


# Score codes


def codes_alike(aligned, given_offsets, invalid, rule, scope, kv, group, golden_aligned=None):
    found = score_codes(
        aligned if golden_aligned is None else golden_aligned,
        given_offsets,
        invalid,
        spec_of(rule, kv, group),
        scope,
    )
    expected = oracle_scores.score_codes(
        aligned.tolist(), given_offsets.tolist(), invalid.tolist(), rule.value, scope.value, group
    )
    return same(found, np.uint16, expected)


def integers(values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("b", [0, 1, -255, L_LIMIT, -(2**24)])
def test_weight_codes_at_boundaries(scope, b):
    aligned = integers([[z + b for z in EDGES]])
    arguments = (integers([b]), valid(len(EDGES)), Rule.WEIGHT_SUM, scope, 1, 1)
    assert codes_alike(aligned, *arguments)
    assert not codes_alike(aligned, *arguments, golden_aligned=aligned + 1)


@pytest.mark.parametrize("heads", [2, 3, 64])
def test_weight_sum_saturates(heads):
    # I = 23 with f = 0 is 2^47: two such heads make 2^48, one more or less decides.
    columns = [
        [23 * 256, 23 * 256, *([-9999] * (heads - 2))],
        [23 * 256 - 1, 23 * 256, *([-9999] * (heads - 2))],
        [23 * 256 + 255, 23 * 256, *([0] * (heads - 2))],
        [24 * 256, *([24 * 256] * (heads - 1))],
        [22 * 256] * heads,
    ]
    aligned = integers(columns).T.copy()
    arguments = (integers([0] * heads), valid(len(columns)), Rule.WEIGHT_SUM, Scope.LAYER, 1, heads)
    assert codes_alike(aligned, *arguments)
    assert oracle_scores.weight_code([2**47, 2**47]) == 1 + oracle_scores.mag(2**48 - 1)
    assert oracle_scores.weight_code([2**47, 2**47 - 2**38]) < 1 + oracle_scores.mag(2**48 - 1)
    assert not codes_alike(aligned, *arguments, golden_aligned=flipped(aligned, 0, 8))


V_EDGES = [sign * v for v in [*powers(25), *range(1015, 1035)] for sign in (1, -1)]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("a", [0, 1, -1, 2**24])
def test_raw_codes_at_boundaries(scope, a):
    aligned = integers([[v + a for v in V_EDGES]])
    arguments = (integers([a]), valid(len(V_EDGES)), Rule.RAW_SUM, scope, 1, 1)
    assert codes_alike(aligned, *arguments)
    assert not codes_alike(aligned, *arguments, golden_aligned=aligned + 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_raw_sum_of_the_largest_values(sign):
    aligned = np.full((64, 2), sign * L_LIMIT, dtype=np.int64)
    aligned[:, 1] *= -1
    a = integers([-sign * 64 * L_LIMIT])
    arguments = (a, valid(2, 64), Rule.RAW_SUM, Scope.LAYER, 64, 1)
    assert codes_alike(aligned, *arguments)
    assert not codes_alike(aligned, *arguments, golden_aligned=flipped(aligned, 0, 23))


@pytest.mark.parametrize(("rule", "scope"), KINDS)
def test_codes_of_invalid_tokens(rule, scope):
    invalid = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]], dtype=bool)
    heads = 6 if rule is Rule.WEIGHT_SUM else 3
    aligned = any_aligned(12, heads, 5, 2000)
    count = heads if rule is Rule.WEIGHT_SUM else (1 if scope is Scope.LAYER else 3)
    given_offsets = integers(range(100, 100 + count))
    assert codes_alike(aligned, given_offsets, invalid, rule, scope, 3, 2)
    found = score_codes(aligned, given_offsets, invalid, spec_of(rule, 3, 2), scope)
    expected = invalid.any(axis=1)[None] if scope is Scope.LAYER else invalid.T
    assert np.array_equal(found == 0, expected)
    assert not codes_alike(
        aligned, given_offsets, invalid, rule, scope, 3, 2, golden_aligned=flipped(aligned, 0, 12)
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_offsets_and_codes(data):
    rule, scope = data.draw(st.sampled_from(KINDS))
    kv, group, tokens = (data.draw(st.integers(1, top)) for top in (3, 3, 40))
    heads = kv * (group if rule is Rule.WEIGHT_SUM else 1)
    spread = data.draw(st.sampled_from([5, 1500, 7000, L_LIMIT]))
    value = st.integers(-spread, spread)
    size = heads * tokens
    aligned = integers(data.draw(st.lists(value, min_size=size, max_size=size)))
    aligned = aligned.reshape(heads, tokens)
    flags = st.lists(st.booleans(), min_size=tokens * kv, max_size=tokens * kv)
    invalid = np.array(data.draw(flags)).reshape(tokens, kv) & data.draw(st.booleans())
    assert offsets_alike(aligned, invalid, rule, scope, kv, group)
    found = offsets(aligned, invalid, spec_of(rule, kv, group), scope)
    assert codes_alike(aligned, found, invalid, rule, scope, kv, group)
