# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_keys, random_query, same_statistics

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_tuples import make_tuples

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'hillinfer[run]'")

from hillinfer.devices.opening import GoldenScorer  # noqa: E402
from hillinfer.scoring.scorer import Scorer, SegmentShadow  # noqa: E402

KEYS = random_keys(1, 1300, 2, 16)
QUERY = random_query(2, 6, 16)


def tensor_of(keys):
    return torch.from_numpy(keys.view(np.float16))


def shadows_of(scorer: Scorer, keys, step):
    """Build the shadows of a sequence as a runtime does, `step` tokens at a time."""
    spec, shadows = scorer.spec, []
    for base in range(0, keys.shape[0], spec.segment_tokens):
        own = tensor_of(keys[base : base + spec.segment_tokens])
        preceding = shadows[-1].statistics if shadows else None
        statistics = scorer.statistics(own, base, preceding)
        shadow = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
        for first in range(0, own.shape[0], step):
            scorer.encode(own[first : first + step], statistics, shadow, first)
        shadows.append(SegmentShadow(base, own.shape[0], shadow, statistics))
    return shadows


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("mode", list(KeyMode))
def test_the_scorer_gives_what_the_model_gives(mode, rule, scope):
    spec = KernelSpec(16, 2, 3, key_mode=mode, rule=rule, segment_tokens=512)
    scorer, model = GoldenScorer(spec, scope), GoldenModel(spec, scope)
    shadows = shadows_of(scorer, KEYS, 77)
    segments = model.encode_sequence(KEYS)
    for shadow, segment in zip(shadows, segments, strict=True):
        assert same_statistics(shadow.statistics, segment.statistics)
    tuples = scorer.tuples(torch.from_numpy(QUERY), 0.25, shadows)
    expected = model.score(QUERY, 0.25, segments)
    assert tuples.shape == (1 if scope is Scope.LAYER else 2, 1300)
    np.testing.assert_array_equal(tuples, make_tuples(expected, 0))


def test_twin_a_flipped_shadow_bit_is_seen():
    spec = KernelSpec(16, 2, 3, key_mode=KeyMode.INT8, segment_tokens=512)
    scorer = GoldenScorer(spec, Scope.LAYER)
    query = torch.from_numpy(QUERY / 64)
    *before, last = shadows_of(scorer, KEYS, 512)
    whole = scorer.tuples(query, 0.25, [*before, last])
    # The first token's exponent in KV head 0, then the sign of one of its codes.
    for place, bit in (((0, 0), 1), ((2, 3), 6)):
        twin = SegmentShadow(
            last.base_position, last.tokens, bit_flipped(last.shadow, place, bit), last.statistics
        )
        assert not np.array_equal(scorer.tuples(query, 0.25, [*before, twin]), whole)


def test_keys_of_any_strides_are_taken():
    spec = KernelSpec(16, 2, 3, segment_tokens=512)
    scorer = GoldenScorer(spec, Scope.LAYER)
    # As attention holds them: (kv_heads, tokens, head_dim), transposed.
    strided = tensor_of(KEYS[:512].copy()).transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert same_statistics(
        scorer.statistics(strided, 0, None), scorer.statistics(tensor_of(KEYS[:512]), 0, None)
    )


def test_a_non_finite_query_is_refused_at_the_call():
    scorer = GoldenScorer(KernelSpec(16, 2, 3, segment_tokens=512), Scope.LAYER)
    query = torch.from_numpy(QUERY.copy())
    query[0, 0] = float("nan")
    with pytest.raises(NonFiniteQueryError):
        scorer.tuples(query, 0.25, [])


def test_other_types_are_refused():
    scorer = GoldenScorer(KernelSpec(16, 2, 3, segment_tokens=512), Scope.LAYER)
    with pytest.raises(TypeError, match="bfloat16"):
        scorer.statistics(tensor_of(KEYS[:9]).bfloat16(), 0, None)
    with pytest.raises(TypeError, match="float16"):
        scorer.tuples(torch.from_numpy(QUERY).half(), 0.25, [])
