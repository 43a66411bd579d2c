# SPDX-License-Identifier: Apache-2.0
"""L' of single tokens: the golden model's, for any variant, number of threads and rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_variants import every_variant

from hillinfer.scoring.coded import AlignedWeights
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

SEGMENT = 512
SCALING = 0.3


def case(mode, rule=Rule.WEIGHT_SUM, tokens=700):
    spec = KernelSpec(24, 2, 3, key_mode=mode, rule=rule, segment_tokens=SEGMENT)
    generator = np.random.default_rng(3)
    keys = generator.normal(size=(tokens, 2, 24)).astype(np.float16)
    # One key without a number.
    keys[600, 1, 5] = np.nan
    query = torch.from_numpy(generator.normal(size=(6, 24)).astype(np.float32))
    weighing = replace(spec, rule=Rule.WEIGHT_SUM)
    golden = GoldenModel(weighing, Scope.LAYER)
    coded = golden.encode_sequence(keys.view(np.uint16))
    expected = golden.aligned(query.numpy(), SCALING, coded)
    scorer = NativeScorer(spec, Scope.LAYER)
    shadows = []
    for one in coded:
        own = keys[one.base_position : one.base_position + SEGMENT]
        shadow = np.zeros((spec.segment_beats, BEAT_BYTES), np.uint8)
        scorer.encode(torch.from_numpy(own), one.statistics, shadow, 0)
        shadows.append(SegmentShadow(one.base_position, len(own), shadow, one.statistics))
    return spec, query, shadows, expected


def check(weights, query, shadows, expected, positions):
    (found,) = weights.of_each(weights.scaled(query, SCALING), shadows, [positions])
    aligned, invalid = expected
    valid = ~invalid[positions]
    assert np.array_equal(found.invalid, ~valid.T)
    heads = np.repeat(valid.T, 3, axis=0)
    assert np.array_equal(found.aligned[heads], aligned[:, positions][heads])
    assert found.aligned.shape == (6, len(positions))


POSITIONS = np.array([0, 3, 63, 64, 200, 511, 512, 600, 601, 699])


@pytest.mark.parametrize("mode", [KeyMode.INT4, KeyMode.INT8])
@every_variant
def test_every_variant(variant, mode):
    spec, query, shadows, expected = case(mode)
    weights = AlignedWeights(spec, variant)
    for positions in (POSITIONS, np.arange(700), np.array([650]), np.zeros(0, np.int64)):
        check(weights, query, shadows, expected, positions)
    assert not np.array_equal(expected[0][:, POSITIONS], expected[0][:, POSITIONS - 1])


@pytest.mark.parametrize("threads", [1, 3])
def test_any_threads_and_either_rule(threads):
    spec, query, shadows, expected = case(KeyMode.INT4, Rule.RAW_SUM)
    torch.set_num_threads(threads)
    try:
        check(AlignedWeights(spec), query, shadows, expected, POSITIONS)
    finally:
        torch.set_num_threads(1)


def test_a_shadow_on_the_drive_is_read_where_it_has_tokens():
    spec, query, shadows, expected = case(KeyMode.INT4)
    asked = []

    def streamed(one):
        def read():
            asked.append(one.base_position)
            return one.shadow

        return StreamedShadow(one.base_position, one.tokens, one.statistics, read)

    both = [streamed(one) for one in shadows]
    check(AlignedWeights(spec), query, both, expected, POSITIONS)
    assert sorted(set(asked)) == [0, SEGMENT]
    asked.clear()
    check(AlignedWeights(spec), query, both, expected, POSITIONS[6:])
    assert set(asked) == {SEGMENT}


def test_tokens_without_codes_are_refused():
    spec, query, shadows, _ = case(KeyMode.INT4)
    weights = AlignedWeights(spec)
    scaled = weights.scaled(query, SCALING)
    for positions in ([-1, 3], [3, 700]):
        with pytest.raises(IndexError, match="of 700 coded tokens"):
            weights.of_each(scaled, shadows, [np.array(positions)])
