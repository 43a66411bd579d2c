# SPDX-License-Identifier: Apache-2.0
"""The torch scorer as a whole against the golden model, over formats, rules, scopes and shapes."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from scorer_cases import (
    KEY_KINDS,
    any_statistics,
    assert_same_tuples,
    flip_bit,
    plain_keys,
    plain_query,
    segments_of,
)
from twins.log_weights import KeyBufferPool, Pieces
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec

SHAPES = [(1, 1, 16), (3, 3, 64), (1, 7, 80), (2, 2, 256), (1, 64, 128), (40, 1, 64), (3, 2, 100)]


def assert_scores_equal_golden(spec, scope, segments, query, scaling):
    mine = TorchScorer(spec, scope).tuples(query, scaling, segments)
    assert_same_tuples(mine, GoldenScorer(spec, scope).tuples(query, scaling, segments))
    return mine


@pytest.mark.parametrize(
    ("shape", "key_mode", "rule", "scope"),
    pairwise([SHAPES, list(KeyMode), list(Rule), list(Scope)]),
)
def test_equal_golden(shape, key_mode, rule, scope):
    kv_heads, group_size, head_dim = shape
    spec = KernelSpec(head_dim, kv_heads, group_size, key_mode, rule, segment_tokens=512)
    keys = KEY_KINDS["rare"](head_dim, 1100 if kv_heads < 40 else 300, kv_heads, head_dim)
    segments = segments_of(TorchScorer(spec, scope), keys)
    distinct = 0
    for scale in (0.01, 0.1, 3.0):
        query = plain_query(group_size, spec, scale)
        mine = assert_scores_equal_golden(spec, scope, segments, query, head_dim**-0.5)
        assert len(mine) == (kv_heads if scope is Scope.KV_HEAD else 1)
        distinct = max(distinct, *(np.unique(own >> 16).size for own in mine), 0)
    # Some scale spreads the scores, so equality is not that of a few constants.
    assert distinct > 40


@pytest.mark.parametrize("part", ["shadow", "tuples", "query"])
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_noticed(part, seed):
    """A bit of the result, or one of an input that must reach the result."""
    # A raw sum, because under a sum of weights the strongest tokens drown the others.
    spec = KernelSpec(64, 1, 1, KeyMode.INT8, Rule.RAW_SUM, segment_tokens=512)
    segments = segments_of(TorchScorer(spec, Scope.LAYER), plain_keys(1, 512, 1, 64))
    query = plain_query(2, spec)
    golden = GoldenScorer(spec, Scope.LAYER).tuples(query, 0.02, segments)
    if part == "shadow":
        # The upper bit of a token's exponent; a low bit of a code may round away.
        segments[0].shadow[0, seed] ^= 0x80
    if part == "query":
        query[0, seed::4] *= -1
    mine = TorchScorer(spec, Scope.LAYER).tuples(query, 0.02, segments)
    if part == "tuples":
        flip_bit(mine, seed)
    with pytest.raises(AssertionError):
        assert_same_tuples(mine, golden)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_case(data):
    draw = data.draw
    kv_heads = draw(st.sampled_from([1, 2, 3, 5]))
    spec = KernelSpec(
        draw(st.integers(1, 96)),
        kv_heads,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(KeyMode)),
        draw(st.sampled_from(Rule)),
        segment_tokens=512,
    )
    scope = draw(st.sampled_from(Scope))
    seed = draw(st.integers(0, 2**20))
    tokens = draw(st.integers(1, 1200))
    keys = KEY_KINDS[draw(st.sampled_from(sorted(KEY_KINDS)))](
        seed, tokens, kv_heads, spec.head_dim
    )
    segments = segments_of(TorchScorer(spec, scope), keys)
    query = plain_query(seed, spec, 2.0 ** draw(st.integers(-10, 4)))
    scaling = draw(st.floats(-2, 2).filter(lambda value: abs(value) > 1e-3))
    assert_scores_equal_golden(spec, scope, segments, query, scaling)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("key_mode", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
@pytest.mark.parametrize("scale", [1e-30, 1e-2, 1e2, 1e30])
def test_any_shadow_and_statistics(key_mode, rule, scope, scale):
    """Every byte a shadow can hold: all exponents, codes that no key has, all shifts."""
    spec = KernelSpec(64, 2, 3, key_mode, rule, segment_tokens=512)
    generator = np.random.default_rng(9)
    segments = [
        SegmentShadow(
            base,
            tokens,
            generator.integers(0, 256, (spec.segment_beats, 64), dtype=np.uint8),
            any_statistics(base, 2, 64),
        )
        for base, tokens in ((0, 512), (512, 512), (1024, 77))
    ]
    assert_scores_equal_golden(spec, scope, segments, plain_query(5, spec, scale), 1.0)


@pytest.mark.parametrize("value", [127, -127])
@pytest.mark.parametrize("rule", Rule)
def test_largest_products(value, rule):
    """Every code at its limit over 256 channels: the largest sums the number types must hold."""
    spec = KernelSpec(256, 2, 2, KeyMode.INT8, rule, segment_tokens=512)
    shadow = np.full((spec.segment_beats, 64), np.int8(value).view(np.uint8))
    for exponent in (0, 12, 13, 14, 40):
        shadow.reshape(-1, spec.group_beats, 64)[:, :2] = exponent
        segments = [SegmentShadow(0, 500, shadow, any_statistics(1, 2, 256))]
        query = torch.full((spec.query_heads, spec.head_dim), 5.0)
        assert_scores_equal_golden(spec, Scope.LAYER, segments, query, 1.0)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 63, 64, 65, 255, 257, 512, 513, 575])
def test_few_tokens(tokens, rule, scope):
    spec = KernelSpec(16, 2, 2, rule=rule, segment_tokens=512)
    segments = segments_of(TorchScorer(spec, scope), KEY_KINDS["rare"](tokens, tokens, 2, 16))
    assert_scores_equal_golden(spec, scope, segments, plain_query(tokens, spec), 0.02)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("rule", Rule)
def test_nothing_valid(rule, scope):
    spec = KernelSpec(16, 2, 2, rule=rule, segment_tokens=512)
    keys = torch.full((300, 2, 16), float("nan"), dtype=torch.float16)
    segments = segments_of(TorchScorer(spec, scope), keys)
    tuples = assert_scores_equal_golden(spec, scope, segments, plain_query(1, spec), 0.02)
    assert not (tuples >> 16).any()


def test_an_empty_last_segment_changes_nothing():
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = TorchScorer(spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 1024, 2, 16))
    empty = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
    query = plain_query(1, spec)
    longer = [*segments, SegmentShadow(1024, 0, empty, segments[-1].statistics)]
    one, other = (scorer.tuples(query, 0.02, some) for some in (segments, longer))
    assert_same_tuples(one, other)
    only_empty = [SegmentShadow(0, 0, empty, segments[0].statistics)]
    assert scorer.tuples(query, 0.02, only_empty).shape == (1, 0)
    assert scorer.tuples(query, 0.02, []).shape == (1, 0)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("segment_tokens", [1024, 65_536])
def test_beyond_one_window(scope, segment_tokens):
    spec = KernelSpec(16, 1, 1, segment_tokens=segment_tokens)
    segments = segments_of(TorchScorer(spec, scope), plain_keys(1, 66_000, 1, 16))
    (tuples,) = assert_scores_equal_golden(spec, scope, segments, plain_query(1, spec), 0.02)
    assert np.array_equal(tuples & 0xFFFF, np.arange(66_000) % 65_536)


# Codes are made and unpacked by the key mode, and products added up by the rule: they do not meet.
@pytest.mark.parametrize(
    ("key_mode", "rule"),
    [
        (KeyMode.INT8, Rule.WEIGHT_SUM),
        (KeyMode.INT4, Rule.RAW_SUM),
        (KeyMode.INT2, Rule.WEIGHT_SUM),
    ],
)
def test_threads_do_not_change_bits(key_mode, rule):
    spec = KernelSpec(64, 3, 3, key_mode, rule)
    keys = plain_keys(1, 1500, 3, 64)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            scorer = TorchScorer(spec, Scope.LAYER)
            segments = segments_of(scorer, keys)
            results.append((segments, scorer.tuples(plain_query(1, spec), 0.01, segments)))
    finally:
        torch.set_num_threads(before)
    (segments, tuples), (other_segments, other_tuples) = results
    for one, other in zip(segments, other_segments, strict=True):
        assert np.array_equal(one.shadow, other.shadow)
    assert_same_tuples(tuples, other_tuples)


@pytest.mark.parametrize("key_mode", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
def test_piece_sizes_do_not_change_bits(key_mode):
    spec = KernelSpec(16, 2, 2, key_mode, segment_tokens=512)
    keys = KEY_KINDS["rare"](1, 1700, 2, 16)
    query = plain_query(1, spec)
    usual = TorchScorer(spec, Scope.LAYER)
    segments = segments_of(usual, keys)
    tuples = usual.tuples(query, 0.02, segments)
    assert Pieces().product_tokens(spec) > 1700
    for limit in (1, 100_000, 300_000):
        pieces = Pieces(limit, limit, limit, limit)
        assert pieces.product_tokens(spec) < 1700
        scorer = TorchScorer(spec, Scope.LAYER, pieces)
        for one, other in zip(segments, segments_of(scorer, keys), strict=True):
            assert np.array_equal(one.shadow, other.shadow)
        assert_same_tuples(scorer.tuples(query, 0.02, segments), tuples)


def test_buffers_under_way_belong_to_one_call():
    pool = KeyBufferPool(KernelSpec(16, 1, 1))
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first
    assert pool.take() is not first


def test_calls_under_way_at_once_do_not_disturb_each_other():
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = TorchScorer(spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 2000, 2, 16))
    queries = [plain_query(seed, spec) for seed in range(4)]
    alone = [scorer.tuples(query, 0.02, segments) for query in queries]
    together = [[] for _ in queries]

    def score(index):
        for _ in range(5):
            together[index] = scorer.tuples(queries[index], 0.02, segments)

    threads = [threading.Thread(target=score, args=(index,)) for index in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(together, alone, strict=True):
        assert_same_tuples(one, other)


def test_scoring_under_inference_mode_can_be_read_outside():
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = TorchScorer(spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 600, 2, 16))
    query = plain_query(1, spec).requires_grad_()
    usual = scorer.tuples(query, 0.02, segments)
    with torch.inference_mode():
        inside = scorer.tuples(query * 1, 0.02, segments)
    assert_same_tuples(inside, usual)


def test_non_finite_queries_raise_before_anything_is_scored():
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = TorchScorer(spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 100, 2, 16))
    query = plain_query(1, spec)
    query[3, 15] = float("nan")
    with pytest.raises(NonFiniteQueryError):
        scorer.tuples(query, 0.02, segments)


def test_refuses_what_does_not_fit():
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = TorchScorer(spec, Scope.LAYER)
    first, second, third = segments_of(scorer, plain_keys(1, 1100, 2, 16))
    query = plain_query(1, spec)
    for wrong in (query.double(), query[:3], query[:, :8]):
        with pytest.raises(ValueError, match="a query is float32"):
            scorer.tuples(wrong, 0.25, [first])
    with pytest.raises(ValueError, match="starts at position"):
        scorer.tuples(query, 0.02, [first, third])
    short = SegmentShadow(0, 400, first.shadow, first.statistics)
    with pytest.raises(ValueError, match="has 400 tokens"):
        scorer.tuples(query, 0.02, [short, second])
    with pytest.raises(ValueError, match="has 513 tokens"):
        scorer.tuples(query, 0.02, [SegmentShadow(0, 513, first.shadow, first.statistics)])
    with pytest.raises(ValueError, match="shadow"):
        scorer.tuples(query, 0.02, [SegmentShadow(0, 9, first.shadow[:5], first.statistics)])
    with pytest.raises(ValueError, match="statistics"):
        scorer.tuples(query, 0.02, [SegmentShadow(0, 9, first.shadow, any_statistics(0, 2, 15))])
