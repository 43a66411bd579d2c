# SPDX-License-Identifier: Apache-2.0
import golden_scalar as scalar
import numpy as np
import pytest

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import offsets, offsets_from_references, reference_positions

LENGTHS = [0, 1, 3, 4, 5, 16, 17, 255, 256, 257, 260, 261, 272, 273, 276, 277, 1000, 70_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_reference_positions(length):
    recent, probes = reference_positions(length)
    assert (recent.dtype, probes.dtype) == (np.int64, np.int64)
    assert (recent.tolist(), probes.tolist()) == scalar.references(length)


def test_reference_positions_by_hand():
    recent, probes = reference_positions(300)
    assert recent.tolist() == [0, 1, 2, 3, *range(44, 300)]
    assert probes.tolist() == [16, 32]


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="-1"):
        reference_positions(-1)


def expected_offsets(aligned, invalid, spec, scope):
    recent, probes = scalar.references(aligned.shape[1])
    group = spec.scored_heads // spec.kv_heads
    if spec.rule is Rule.WEIGHT_SUM:
        return [
            scalar.weight_offset(
                [int(aligned[h, p]) for p in recent if not invalid[p, h // group]],
                [int(aligned[h, p]) for p in probes if not invalid[p, h // group]],
            )
            for h in range(spec.scored_heads)
        ]
    if scope is Scope.LAYER:
        return [
            scalar.raw_offset(
                [int(aligned[:, p].sum()) for p in recent + probes if not invalid[p].any()]
            )
        ]
    return [
        scalar.raw_offset([int(aligned[g, p]) for p in recent + probes if not invalid[p, g]])
        for g in range(spec.kv_heads)
    ]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("span", [1, 300, 4000, 2**24 - 1])
@pytest.mark.parametrize("length", [0, 1, 3, 40, 260, 400, 1500])
def test_offsets_equal_the_scalar_restatement(length, span, rule, scope):
    spec = KernelSpec(16, 3, 5, rule=rule)
    generator = np.random.default_rng(length)
    aligned = generator.integers(-span, span + 1, (spec.scored_heads, length))
    invalid = generator.random((length, 3)) < 0.1
    found = offsets(aligned, invalid, spec, scope)
    expected = expected_offsets(aligned, invalid, spec, scope)
    assert found.dtype == np.int64
    assert found.tolist() == expected

    recent, probes = reference_positions(length)
    parts = (aligned[:, recent], invalid[recent], aligned[:, probes], invalid[probes])
    assert offsets_from_references(*parts, spec, scope).tolist() == expected


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
def test_only_reference_tokens_matter(rule, scope):
    spec = KernelSpec(16, 2, 3, rule=rule)
    aligned = np.random.default_rng(1).integers(-500, 500, (spec.scored_heads, 600))
    valid = np.zeros((600, 2), dtype=np.bool_)
    whole = offsets(aligned, valid, spec, scope).tolist()
    others = np.setdiff1d(np.arange(600), np.concatenate(reference_positions(600)))
    changed = aligned.copy()
    changed[:, others] += 10_000
    assert offsets(changed, valid, spec, scope).tolist() == whole
    for position in (0, 3, 16, 336, 344, 599):
        twin = aligned.copy()
        twin[:, position] += 10_000
        assert offsets(twin, valid, spec, scope).tolist() != whole


def test_weight_offsets_by_hand():
    spec = KernelSpec(16, 1, 1)
    for values, expected in (
        ([100], 100),
        # Twice a weight is an octave more; one and a half times, half an octave in straight lines.
        ([7, 7], 7 + 256),
        ([0, -256], 128),
        # 260 equal: bl = 24 + 9, 260/256 of 2^8.
        ([0] * 260, 8 * 256 + 4),
    ):
        aligned = np.array([values], dtype=np.int64)
        valid = np.zeros((len(values), 1), dtype=np.bool_)
        assert offsets(aligned, valid, spec, Scope.LAYER).tolist() == [expected]


def test_a_probe_token_counts_sixteen_times_in_a_weight_sum_and_once_in_a_mean():
    none, one = np.zeros((1, 0), dtype=np.int64), np.array([[96]], dtype=np.int64)
    no_mark, mark = np.zeros((0, 1), dtype=np.bool_), np.zeros((1, 1), dtype=np.bool_)
    spec = KernelSpec(16, 1, 1)
    assert offsets_from_references(none, no_mark, one, mark, spec, Scope.LAYER).tolist() == [
        96 + 4 * 256
    ]
    spec = KernelSpec(16, 1, 1, rule=Rule.RAW_SUM)
    assert offsets_from_references(one - 96, mark, one, mark, spec, Scope.LAYER).tolist() == [48]


def test_the_mean_is_floored():
    spec = KernelSpec(16, 1, 1, rule=Rule.RAW_SUM)
    valid = np.zeros((2, 1), dtype=np.bool_)
    assert offsets(np.array([[0, -1]]), valid, spec, Scope.LAYER).tolist() == [-1]
    assert offsets(np.array([[0, 1]]), valid, spec, Scope.LAYER).tolist() == [0]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
def test_no_valid_reference_gives_zero(rule, scope):
    spec = KernelSpec(16, 2, 3, rule=rule)
    aligned = np.full((spec.scored_heads, 30), 777, dtype=np.int64)
    found = offsets(aligned, np.ones((30, 2), dtype=np.bool_), spec, scope)
    assert not found.any()


def test_an_invalid_key_leaves_other_heads_alone():
    aligned = np.random.default_rng(2).integers(-500, 500, (6, 30))
    invalid = np.zeros((30, 2), dtype=np.bool_)
    spec = KernelSpec(16, 2, 3)
    whole = offsets(aligned, invalid, spec, Scope.LAYER)
    invalid[aligned[5].argmax(), 1] = True
    found = offsets(aligned, invalid, spec, Scope.LAYER)
    assert np.array_equal(found[:3], whole[:3])
    assert found[5] != whole[5]


def test_raw_sum_layer_leaves_a_token_out_of_every_head():
    spec = KernelSpec(16, 2, 1, rule=Rule.RAW_SUM)
    aligned = np.array([[1, 10], [100, 1000]])
    invalid = np.array([[False, False], [False, True]])
    assert offsets(aligned, invalid, spec, Scope.LAYER).tolist() == [101]
    assert offsets(aligned, invalid, spec, Scope.KV_HEAD).tolist() == [5, 100]


def test_a_million_tokens_fit():
    spec = KernelSpec(16, 1, 1)
    aligned = np.zeros((1, 2**20), dtype=np.int64)
    valid = np.zeros((2**20, 1), dtype=np.bool_)
    recent, probes = scalar.references(2**20)
    total = (len(recent) + 16 * len(probes)) << 24
    length = total.bit_length()
    expected = ((length - 25) << 8) + ((total >> (length - 9)) & 255)
    assert offsets(aligned, valid, spec, Scope.LAYER).tolist() == [expected]
