# SPDX-License-Identifier: Apache-2.0
import itertools
from itertools import product

import golden_scalar as scalar
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_keys, random_query, same_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.layout import read_codes, write_codes
from hillinfer_model.offsets import offsets, offsets_from_references, reference_positions
from hillinfer_model.query_codes import encode_query
from hillinfer_model.scores import score_codes
from hillinfer_model.selection import select_positions

MODES, RULES, SCOPES = list(KeyMode), list(Rule), list(Scope)


def with_nans(keys):
    keys = keys.copy()
    keys[keys.shape[0] // 3, 0, 1] = 0x7E00
    keys[-1, -1, 0] = 0xFC01
    return keys


# (head_dim, kv_heads, group_size); default statistics, own, preceding's, own in both segments.
TOKENS_AND_SHAPES = [
    (20, (80, 2, 3)),
    (60, (16, 3, 5)),
    (530, (6, 2, 2)),
    (800, (4, 1, 3)),
    (10, (64, 40, 1)),
    (12, (256, 1, 7)),
]


# Rule and scope meet in one function, so they come as one here.
@pytest.mark.parametrize(
    ("keys_of", "mode", "scores"),
    pairwise([TOKENS_AND_SHAPES, MODES, list(product(RULES, SCOPES))]),
)
def test_whole_chain_equals_the_scalar_restatement(keys_of, mode, scores):
    (tokens, shape), (rule, scope) = keys_of, scores
    head_dim, kv_heads, group = shape
    spec = KernelSpec(*shape, key_mode=mode, rule=rule, segment_tokens=512)
    keys = with_nans(random_keys(tokens, tokens, kv_heads, head_dim))
    query = random_query(tokens, spec.query_heads, head_dim)
    model = GoldenModel(spec, scope)
    found = model.score(query, head_dim**-0.5, model.encode_sequence(keys))
    expected = scalar.sequence_codes(
        keys.tolist(),
        query.tolist(),
        head_dim**-0.5,
        group,
        mode.value,
        rule.value,
        scope.value,
        512,
    )
    assert found.dtype == np.uint16
    assert found.tolist() == expected
    assert (found == 0).sum() == 2
    assert bit_flipped(found, (0, 1), 0).tolist() != expected


def small(mode=KeyMode.INT4, rule=Rule.WEIGHT_SUM, scope=Scope.LAYER, **more):
    spec = KernelSpec(16, 2, 3, key_mode=mode, rule=rule, segment_tokens=512, **more)
    return GoldenModel(spec, scope)


def score(model, keys, query):
    return model.score(query, 0.25, model.encode_sequence(keys))


KEYS = with_nans(random_keys(1, 1300, 2, 16))
QUERY = random_query(2, 6, 16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_twins_a_flipped_bit_of_each_part_is_seen(mode, rule):
    model = small(mode, rule)
    # A faint query, so that every head and token has weight.
    query = QUERY / 64
    segments = model.encode_sequence(KEYS)
    whole = model.score(query, 0.25, segments)
    last = segments[-1]
    # The segment's best token (where a weight has the most bits), in the channel that bears
    # most on the first head.
    token = int(whole[0, 1024:].argmax())
    queries = encode_query(query, last.statistics, 0.25, model.spec).codes
    channel = int(np.abs(queries[0].astype(int)).argmax())
    codes = bit_flipped(last.codes.codes, (token, 0, channel), 1)
    exponents = bit_flipped(last.codes.exponents, (token, 0), 1)
    for twin in (
        CodedSegment(1024, KeyCodes(codes, last.codes.exponents), last.statistics),
        CodedSegment(1024, KeyCodes(last.codes.codes, exponents), last.statistics),
        CodedSegment(1024, last.codes, segments[0].statistics),
    ):
        assert not np.array_equal(model.score(query, 0.25, [*segments[:2], twin]), whole)
    assert not np.array_equal(model.score(-query, 0.25, segments), whole)


def test_scopes_agree_where_there_is_one_kv_head():
    for rule in RULES:
        for mode in MODES:
            spec = KernelSpec(16, 1, 3, key_mode=mode, rule=rule, segment_tokens=512)
            layer, head = (score(GoldenModel(spec, s), KEYS[:, :1], QUERY[:3]) for s in SCOPES)
            assert np.array_equal(layer, head)


def test_fp16_cast_on_the_fly_scores_as_int8():
    for rule in RULES:
        for scope in SCOPES:
            cast, stored = (
                score(small(mode, rule, scope), KEYS, QUERY)
                for mode in (KeyMode.FP16, KeyMode.INT8)
            )
            assert np.array_equal(cast, stored)


@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_a_padded_model_scores_the_same(head_dim):
    # What padding channels may do to the result: nothing.
    keys, query = random_keys(3, 700, 2, head_dim), random_query(4, 6, head_dim)
    padded = KernelSpec(head_dim, 2, 3).padded_head_dim
    wide_keys = np.zeros((700, 2, padded), dtype=np.uint16)
    wide_keys[:, :, :head_dim] = keys
    wide_query = np.zeros((6, padded), dtype=np.float32)
    wide_query[:, :head_dim] = query
    for mode in MODES:
        for rule in RULES:
            narrow = GoldenModel(KernelSpec(head_dim, 2, 3, key_mode=mode, rule=rule), Scope.LAYER)
            wide = GoldenModel(KernelSpec(padded, 2, 3, key_mode=mode, rule=rule), Scope.LAYER)
            assert np.array_equal(score(narrow, keys, query), score(wide, wide_keys, wide_query))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, deadline=None)
@given(block_tokens=st.integers(1, 1500), tokens=st.integers(0, 1300))
def test_blocks_hold_every_code_whatever_their_length(scope, rule, block_tokens, tokens):
    model = small(rule=rule, scope=scope, block_tokens=block_tokens)
    segments = model.encode_sequence(KEYS[:tokens])
    codes = model.score(QUERY, 0.25, segments)
    assert np.array_equal(codes, score(small(rule=rule, scope=scope), KEYS[:tokens], QUERY))
    seen = [[] for _ in codes]
    for block in model.score_blocks(QUERY, 0.25, segments):
        assert 0 < block.tuples.size <= block_tokens
        assert block.positions.tolist() == [
            len(seen[block.kv_head]) + i for i in range(block.tuples.size)
        ]
        seen[block.kv_head].extend(block.codes.tolist())
    assert seen == codes.tolist()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", [KeyMode.INT8, KeyMode.INT2])
def test_segments_scored_apart_equal_the_whole(mode, rule, scope):
    # What a host and a device do: each scores its segments with offsets from reference tokens.
    model = small(mode, rule, scope)
    segments = model.encode_sequence(KEYS)
    aligned, invalid = model.aligned(QUERY, 0.25, segments)
    recent, probes = reference_positions(aligned.shape[1])
    base = offsets_from_references(
        aligned[:, recent],
        invalid[recent],
        aligned[:, probes],
        invalid[probes],
        model.spec,
        scope,
    )
    assert np.array_equal(base, offsets(aligned, invalid, model.spec, scope))
    apart = []
    for start, end in ((0, 512), (512, 700), (700, 1024), (1024, 1300)):
        part = slice(start, end)
        apart.append(score_codes(aligned[:, part], base, invalid[part], model.spec, scope))
    whole = model.score(QUERY, 0.25, segments)
    assert np.array_equal(np.concatenate(apart, axis=1), whole)
    twin = score_codes(aligned, base + 256, invalid, model.spec, scope)
    assert not np.array_equal(twin, whole)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 200), max_size=8), st.sampled_from(MODES))
def test_codes_do_not_depend_on_how_a_segment_grew(steps, mode):
    model = small(mode)
    keys = KEYS[512:1024]
    statistics = model.statistics(keys, 512, None)
    once, grown = (np.zeros((model.spec.segment_beats, 64), dtype=np.uint8) for _ in range(2))
    write_codes(once, 0, model.encode(keys, statistics), model.spec)
    cuts = [0, *(c for c in np.cumsum(steps).tolist() if c < 512), 512]
    for start, end in itertools.pairwise(cuts):
        write_codes(grown, start, model.encode(keys[start:end], statistics), model.spec)
    assert np.array_equal(once, grown)
    assert np.array_equal(
        read_codes(grown, 0, 512, model.spec).codes, model.encode(keys, statistics).codes
    )


def test_a_short_segment_takes_the_statistics_of_the_one_before():
    first, second, third = small().encode_sequence(KEYS[:1100])
    assert same_statistics(third.statistics, second.statistics)
    assert not same_statistics(third.statistics, first.statistics)


def test_statistics_once_taken_stay():
    # A segment scored at 300 tokens keeps what it had then, so its codes differ from those of a
    # segment first scored when it is full.
    model = small()
    early = model.statistics(KEYS[512:812], 512, None)
    late = model.statistics(KEYS[512:1024], 512, None)
    first = model.encode_sequence(KEYS[:512])[0]
    scores = [
        model.score(
            QUERY,
            0.25,
            [first, CodedSegment(512, model.encode(KEYS[512:1024], taken), taken)],
        )
        for taken in (early, late)
    ]
    assert scores[0].shape == scores[1].shape == (1, 1024)
    assert not np.array_equal(*scores)


@pytest.mark.parametrize(
    ("segment_tokens", "rule", "scope"), pairwise([[1024, 65_536], RULES, SCOPES])
)
def test_contexts_beyond_a_window(segment_tokens, rule, scope):
    tokens = 65_536 + 4500
    spec = KernelSpec(
        4, 2, 1, rule=rule, segment_tokens=segment_tokens, block_tokens=1000, key_mode=KeyMode.INT8
    )
    model = GoldenModel(spec, scope)
    keys = random_keys(6, tokens, 2, 4)
    segments = model.encode_sequence(keys)
    query = random_query(7, 2, 4)
    codes = model.score(query, 0.5, segments)
    blocks = list(model.score_blocks(query, 0.5, segments))
    assert {block.window for block in blocks} == {0, 65_536}
    for kv_head, row in enumerate(codes):
        own = [block for block in blocks if block.kv_head == kv_head]
        assert np.array_equal(np.concatenate([b.positions for b in own]), np.arange(tokens))
        assert np.array_equal(np.concatenate([b.codes for b in own]), row)
        assert all(b.positions[-1] < b.window + 65_536 for b in own)
        # 65 blocks of 1,000, one of 536 at the window's end, and five of the rest.
        assert [b.tuples.size for b in own] == [1000] * 65 + [536] + [1000] * 4 + [500]

    # The whole sequence's ranking against one made in Python.
    row, kept = codes[0], np.array([0, 70_000])
    ranked = sorted(set(range(tokens)) - {0, 70_000}, key=lambda p: (-int(row[p]), p))
    expected = sorted([0, 70_000, *ranked[:500]])
    assert select_positions(row, 502, kept).tolist() == expected
    assert max(expected[:-1]) > 65_536


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", RULES)
def test_no_tokens(rule, scope):
    model = small(rule=rule, scope=scope)
    sets = 1 if scope is Scope.LAYER else 2
    assert model.encode_sequence(KEYS[:0]) == []
    empty = KeyCodes(np.zeros((0, 2, 16), dtype=np.int8), np.zeros((0, 2), dtype=np.uint8))
    statistics = model.statistics(KEYS[:0], 0, None)
    for segments in ([], [CodedSegment(0, empty, statistics)]):
        assert model.score(QUERY, 0.25, segments).shape == (sets, 0)
        assert list(model.score_blocks(QUERY, 0.25, segments)) == []


def test_a_non_finite_query_is_refused_before_the_first_block():
    model = small()
    bad = QUERY.copy()
    bad[5, 3] = np.nan
    for segments in ([], model.encode_sequence(KEYS)):
        with pytest.raises(NonFiniteQueryError):
            model.score_blocks(bad, 0.25, segments)


def test_segments_that_are_not_consecutive_are_refused():
    model = small()
    first, second, third = model.encode_sequence(KEYS)
    for wrong in ([second], [first, third], [first, first], [first, third, second]):
        with pytest.raises(ValueError, match="segment"):
            model.score(QUERY, 0.25, wrong)
    short = CodedSegment(
        0,
        KeyCodes(first.codes.codes[:511], first.codes.exponents[:511]),
        first.statistics,
    )
    with pytest.raises(ValueError, match="only the last"):
        model.score(QUERY, 0.25, [short, second])
    model.score(QUERY, 0.25, [short])
