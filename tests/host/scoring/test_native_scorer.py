# SPDX-License-Identifier: Apache-2.0
"""The native scorer against the golden model, for every instruction set of this machine."""

import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_variants import VARIANTS, every_variant, native_scorer
from pairwise import pairwise
from scorer_cases import (
    KEY_KINDS,
    any_statistics,
    assert_same_segments,
    assert_same_tuples,
    flip_bit,
    plain_keys,
    plain_query,
    segments_of,
)
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer.native.library import Variant
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec

SHAPES = [(1, 1, 16), (3, 3, 64), (1, 7, 80), (2, 2, 256), (1, 64, 128), (40, 1, 64), (3, 2, 100)]
INTEGER_MODES = [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2]
# Rule and scope meet in one function, so they come as one below.
SCORES = list(product(Rule, Scope))


def with_copies(spec, segments):
    layout = ShadowLayout(spec)
    copied = []
    for segment in segments:
        probes = ProbeShadow(layout, segment.base_position // spec.segment_tokens)
        probes.take(segment.shadow, 0, segment.tokens)
        copied.append(replace(segment, probe_copy=probes))
    return copied


def streamed(segments):
    """The same from a drive: every shadow lies in one buffer that the next one overwrites."""
    buffer = np.empty_like(segments[0].shadow)

    def read(segment):
        buffer[...] = segment.shadow
        return buffer

    return [
        StreamedShadow(one.base_position, one.tokens, one.statistics, lambda own=one: read(own))
        for one in segments
    ]


def assert_scores_equal_golden(scorer, segments, query, scaling):
    golden = GoldenScorer(scorer.spec, scorer.scope).tuples(query, scaling, segments)
    mine = scorer.tuples(query, scaling, segments)
    assert_same_tuples(mine, golden)
    for other in (with_copies(scorer.spec, segments), streamed(segments)):
        assert_same_tuples(scorer.tuples(query, scaling, other), golden)
    return mine


@pytest.mark.parametrize("variant", Variant)
def test_a_variant_is_tested_where_the_processor_has_it(variant):
    assert native_scorer(variant, KernelSpec(64, 3, 3), Scope.LAYER).scope is Scope.LAYER


@every_variant
@pytest.mark.parametrize(
    ("shape", "key_mode", "rule", "scope"),
    pairwise([SHAPES, list(KeyMode), list(Rule), list(Scope)]),
)
def test_equal_golden(shape, key_mode, rule, scope, variant):
    kv_heads, group_size, head_dim = shape
    spec = KernelSpec(head_dim, kv_heads, group_size, key_mode, rule, segment_tokens=512)
    scorer = native_scorer(variant, spec, scope)
    keys = KEY_KINDS["rare"](head_dim, 1100 if kv_heads < 40 else 300, kv_heads, head_dim)
    segments = segments_of(scorer, keys)
    assert_same_segments(segments, segments_of(TorchScorer(spec, scope), keys))
    distinct = 0
    for scale in (0.01, 0.1, 3.0):
        query = plain_query(group_size, spec, scale)
        mine = assert_scores_equal_golden(scorer, segments, query, head_dim**-0.5)
        distinct = max(distinct, np.unique(mine[0] >> 16).size)
    # Some scale spreads the scores, so equality is not that of a few constants.
    assert distinct > 40


@every_variant
@pytest.mark.parametrize("part", ["shadow", "tuples", "query"])
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_noticed(part, seed, variant):
    """A bit of the result, or one of an input that must reach the result."""
    spec = KernelSpec(64, 1, 1, KeyMode.INT8, Rule.RAW_SUM, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 512, 1, 64))
    query = plain_query(2, spec)
    golden = GoldenScorer(spec, Scope.LAYER).tuples(query, 0.02, segments)
    if part == "shadow":
        segments[0].shadow[0, seed] ^= 0x80
    if part == "query":
        query[0, seed::4] *= -1
    mine = scorer.tuples(query, 0.02, segments)
    if part == "tuples":
        flip_bit(mine, seed)
    with pytest.raises(AssertionError):
        assert_same_tuples(mine, golden)


@every_variant
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_case(data, variant):
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
    scorer = native_scorer(variant, spec, draw(st.sampled_from(Scope)))
    seed = draw(st.integers(0, 2**20))
    kind = draw(st.sampled_from(sorted(KEY_KINDS)))
    keys = KEY_KINDS[kind](seed, draw(st.integers(1, 1200)), kv_heads, spec.head_dim)
    segments = segments_of(scorer, keys)
    assert_same_segments(segments, segments_of(GoldenScorer(spec, scorer.scope), keys))
    query = plain_query(seed, spec, 2.0 ** draw(st.integers(-10, 4)))
    scaling = draw(st.floats(-2, 2).filter(lambda value: abs(value) > 1e-3))
    assert_scores_equal_golden(scorer, segments, query, scaling)


# A variant has a loop for each key mode.
@pytest.mark.parametrize(
    ("loop", "scores", "scale"),
    pairwise([list(product(VARIANTS, INTEGER_MODES)), SCORES, [1e-30, 1e-2, 1e2, 1e30]]),
)
def test_any_shadow_and_statistics(loop, scores, scale):
    """Every byte a shadow can hold: all exponents, codes that no key has, all shifts."""
    (variant, key_mode), (rule, scope) = loop, scores
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
    scorer = native_scorer(variant, spec, scope)
    assert_scores_equal_golden(scorer, segments, plain_query(5, spec, scale), 1.0)


@every_variant
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0x81, 0x77, 0x88, 0xAA, 0x55, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key_mode", INTEGER_MODES)
def test_largest_products(key_mode, sign, byte, variant):
    """Codes at their limits over 256 channels: no sum on the way may saturate or wrap."""
    spec = KernelSpec(256, 2, 3, key_mode, Rule.RAW_SUM, segment_tokens=512)
    shadow = np.full((spec.segment_beats, 64), byte, dtype=np.uint8)
    for exponent in (0, 5, 13, 40):
        shadow.reshape(-1, spec.group_beats, 64)[:, :2] = exponent
        segments = [SegmentShadow(0, 500, shadow, any_statistics(1, 2, 256))]
        segments[0].statistics.exponents[...] = 0
        query = torch.full((spec.query_heads, spec.head_dim), 5.0 * sign)
        scorer = native_scorer(variant, spec, Scope.LAYER)
        assert_scores_equal_golden(scorer, segments, query, 1.0)


FEW = [1, 2, 4, 5, 16, 17, 63, 64, 65, 255, 256, 257, 260, 261, 272, 273, 512, 513, 575]


@pytest.mark.parametrize(("tokens", "scores", "variant"), pairwise([FEW, SCORES, list(VARIANTS)]))
def test_few_tokens(tokens, scores, variant):
    rule, scope = scores
    spec = KernelSpec(16, 2, 2, rule=rule, segment_tokens=512)
    scorer = native_scorer(variant, spec, scope)
    segments = segments_of(scorer, KEY_KINDS["rare"](tokens, tokens, 2, 16))
    assert_scores_equal_golden(scorer, segments, plain_query(tokens, spec), 0.02)


@every_variant
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("rule", Rule)
def test_nothing_valid(rule, scope, variant):
    spec = KernelSpec(16, 2, 2, rule=rule, segment_tokens=512)
    scorer = native_scorer(variant, spec, scope)
    segments = segments_of(scorer, torch.full((300, 2, 16), float("nan"), dtype=torch.float16))
    tuples = assert_scores_equal_golden(scorer, segments, plain_query(1, spec), 0.02)
    assert not (tuples >> 16).any()


@every_variant
@pytest.mark.parametrize("segment_tokens", [1024, 65_536])
def test_beyond_one_window(segment_tokens, variant):
    spec = KernelSpec(16, 1, 1, segment_tokens=segment_tokens)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 66_000, 1, 16))
    (tuples,) = assert_scores_equal_golden(scorer, segments, plain_query(1, spec), 0.02)
    assert np.array_equal(tuples & 0xFFFF, np.arange(66_000) % 65_536)


@every_variant
@pytest.mark.parametrize("key_mode", KeyMode)
@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 64), (2, 100), (2, 256)])
def test_shadows_equal_golden(kv_heads, head_dim, kind, key_mode, variant):
    """Token by token and in pieces, next to bytes that must stay, from keys with gaps."""
    spec = KernelSpec(head_dim, kv_heads, 1, key_mode, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    keys = KEY_KINDS[kind](7, 150, kv_heads, head_dim)
    apart = torch.empty((150, kv_heads, head_dim, 2), dtype=torch.float16)[..., 0]
    apart.copy_(keys)
    statistics = any_statistics(3, kv_heads, head_dim)
    before = np.random.default_rng(0).integers(0, 256, (spec.segment_beats, 64), dtype=np.uint8)
    mine, theirs = before.copy(), before.copy()
    GoldenScorer(spec, Scope.LAYER).encode(keys, statistics, theirs, 37)
    first = 0
    for tokens in (1, 1, 30, 70, 48):
        scorer.encode(apart[first : first + tokens], statistics, mine, 37 + first)
        first += tokens
    assert np.array_equal(mine, theirs)
    flip_bit(mine, head_dim)
    assert not np.array_equal(mine, theirs)


@every_variant
def test_threads_do_not_change_bits(variant):
    spec = KernelSpec(64, 3, 3)
    scorer = native_scorer(variant, spec, Scope.KV_HEAD)
    keys = plain_keys(1, 3000, 3, 64)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            segments = segments_of(scorer, keys)
            results.append((segments, scorer.tuples(plain_query(1, spec), 0.01, segments)))
    finally:
        torch.set_num_threads(before)
    for segments, tuples in results[1:]:
        assert_same_segments(segments, results[0][0])
        assert_same_tuples(tuples, results[0][1])


@every_variant
def test_calls_at_once_do_not_disturb_each_other(variant):
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    segments = segments_of(scorer, plain_keys(1, 2000, 2, 16))
    queries = [plain_query(seed, spec) for seed in range(4)]
    alone = [scorer.tuples(query, 0.02, segments) for query in queries]
    together = [[] for _ in queries]
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def score(index):
        for _ in range(20):
            together[index] = scorer.tuples(queries[index], 0.02, segments)

    threads = [threading.Thread(target=score, args=(index,)) for index in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    for one, other in zip(together, alone, strict=True):
        assert_same_tuples(one, other)


@every_variant
def test_refuses_what_does_not_fit(variant):
    spec = KernelSpec(16, 2, 2, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    keys = plain_keys(1, 100, 2, 16)
    (segment,) = segments_of(scorer, keys)
    query = plain_query(1, spec)
    assert scorer.tuples(query, 0.02, []).shape == (1, 0)
    with pytest.raises(ValueError, match="a query is float32"):
        scorer.tuples(query.double(), 0.02, [segment])
    with pytest.raises(ValueError, match="shadow"):
        scorer.tuples(query, 0.02, [replace(segment, shadow=segment.shadow[:5])])
    with pytest.raises(ValueError, match="outside"):
        scorer.encode(keys, segment.statistics, segment.shadow, 500)
    query[0, 0] = float("nan")
    with pytest.raises(NonFiniteQueryError):
        scorer.tuples(query, 0.02, [segment])


@every_variant
@pytest.mark.parametrize("key_mode", INTEGER_MODES)
def test_tokens_coded_one_at_a_time_are_those_coded_together(key_mode, variant):
    """A single token is coded without giving up Python's lock: the same bits."""
    spec = KernelSpec(24, 2, 3, key_mode, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    keys = KEY_KINDS["rare"](4, 150, 2, 24)
    (golden,) = segments_of(GoldenScorer(spec, Scope.LAYER), keys)
    shadow = np.zeros_like(golden.shadow)
    for token in range(150):
        scorer.encode(keys[token : token + 1], golden.statistics, shadow, token)
    assert np.array_equal(shadow, golden.shadow)
    scorer.encode(-keys[7:8], golden.statistics, shadow, 7)
    assert not np.array_equal(shadow, golden.shadow)


@every_variant
def test_coding_after_the_number_of_threads_changed(variant):
    spec = KernelSpec(24, 2, 3, KeyMode.INT4, segment_tokens=512)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    keys = plain_keys(4, 400, 2, 24)
    (golden,) = segments_of(GoldenScorer(spec, Scope.LAYER), keys)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            shadow = np.zeros_like(golden.shadow)
            scorer.encode(keys, golden.statistics, shadow, 0)
            assert np.array_equal(shadow, golden.shadow)
    finally:
        torch.set_num_threads(before)
