# SPDX-License-Identifier: Apache-2.0
"""Scaling, scoring and selecting in one call, against the golden model's scores and full sort."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_variants import every_variant, native_scorer
from scorer_cases import plain_keys, plain_query, segments_of
from test_native_scorer import streamed, with_copies
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import kept_positions, select_positions

SCALING = 0.1


def spec_of(rule=Rule.WEIGHT_SUM, mode=KeyMode.INT4, group_size=3):
    return KernelSpec(24, 2, group_size, mode, rule=rule, segment_tokens=512)


def case(spec, tokens, seed=0):
    keys = plain_keys(seed, tokens, spec.kv_heads, spec.head_dim)
    return segments_of(TorchScorer(spec, Scope.LAYER), keys), plain_query(seed, spec)


def golden_sets(spec, scope, case, coming, wanted, scaling=SCALING):
    """The golden scores of every token, then the golden selection."""
    segments, query = case
    tokens = segments[-1].base_position + segments[-1].tokens
    tuples = GoldenScorer(spec, scope).tuples(query, scaling, segments, coming)
    codes = (tuples >> 16).astype(np.uint16)
    kept = kept_positions(tokens + coming, wanted.sinks, wanted.recent)
    kept = kept[: len(kept) - coming]
    newest = np.arange(tokens, tokens + coming)
    return [np.append(select_positions(own, wanted.count - coming, kept), newest) for own in codes]


def assert_same_sets(mine, golden):
    assert len(mine) == len(golden)
    for one, other in zip(mine, golden, strict=True):
        assert one.dtype == np.int64
        np.testing.assert_array_equal(one, other)


@every_variant
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_sets_are_the_golden_ones(data, variant):
    draw = data.draw
    spec = spec_of(draw(st.sampled_from(Rule)), draw(st.sampled_from(KeyMode)))
    scope, coming = draw(st.sampled_from(Scope)), draw(st.integers(0, 1))
    tokens = draw(st.integers(1, 1200))
    sinks, recent = draw(st.integers(0, 6)), draw(st.integers(coming, 40))
    length = tokens + coming
    count = draw(st.integers(min(sinks + recent, length), length))
    wanted = Wanted(count, sinks, recent)
    made = case(spec, tokens, draw(st.integers(0, 1000)))
    golden = golden_sets(spec, scope, made, coming, wanted)
    scorer = native_scorer(variant, spec, scope)
    segments, query = made
    for own in (segments, with_copies(spec, segments), streamed(segments)):
        assert_same_sets(scorer.choose(query, SCALING, own, coming, [wanted])[0], golden)


@every_variant
@pytest.mark.parametrize("scope", Scope)
def test_equal_scores_fall_to_the_lower_position(scope, variant):
    """Keys that repeat: every place is contested, and one key less moves a place."""
    spec = spec_of()
    keys = plain_keys(3, 40, 2, 24).repeat(20, 1, 1)
    made = segments_of(TorchScorer(spec, Scope.LAYER), keys), plain_query(3, spec)
    scorer, wanted = native_scorer(variant, spec, scope), Wanted(77, 2, 5)
    golden = golden_sets(spec, scope, made, 0, wanted)
    mine = scorer.choose(made[1], SCALING, made[0], 0, [wanted])[0]
    assert_same_sets(mine, golden)
    more = scorer.choose(made[1], SCALING, made[0], 0, [Wanted(78, 2, 5)])[0]
    for one, other in zip(more, golden, strict=True):
        assert set(other.tolist()) < set(one.tolist())


@every_variant
@pytest.mark.parametrize("change", ["query", "shadow", "scaling", "count", "coming"])
def test_what_changes_a_set_is_noticed(change, variant):
    spec, wanted, scaling, coming = spec_of(Rule.RAW_SUM), Wanted(60, 4, 8), SCALING, 0
    made = case(spec, 700)
    golden = golden_sets(spec, Scope.LAYER, made, 0, wanted)
    segments, query = made
    if change == "query":
        query[0] *= -4
    if change == "shadow":
        segments[0].shadow[:, 5:40] ^= 0x55
    if change == "scaling":
        scaling = -SCALING
    if change == "count":
        wanted = Wanted(61, 4, 8)
    if change == "coming":
        coming = 1
    scorer = native_scorer(variant, spec, Scope.LAYER)
    with pytest.raises(AssertionError):
        assert_same_sets(scorer.choose(query, scaling, segments, coming, [wanted])[0], golden)


@every_variant
def test_queries_are_summed_as_the_contract_says(variant):
    """Of 2^30, 1 and -2^30 a float32 sum leaves nothing, and neither does the wrong order."""
    spec = spec_of(Rule.RAW_SUM, KeyMode.INT8)
    segments, query = case(spec, 900, 5)
    small = query.clone()
    small[0], small[2] = 0, 0
    query[0], query[2] = 2.0**30, -(2.0**30)
    wanted = Wanted(90, 1, 1)
    scorer = native_scorer(variant, spec, Scope.KV_HEAD)
    mine = scorer.choose(query, 1.0, segments, 0, [wanted])[0]
    assert_same_sets(mine, golden_sets(spec, Scope.KV_HEAD, (segments, query), 0, wanted, 1.0))
    lost = query.clone()
    lost[:3] = lost[:3].sum(0) * 0
    with pytest.raises(AssertionError):
        assert_same_sets(scorer.choose(lost, 1.0, segments, 0, [wanted])[0], mine)


@every_variant
@pytest.mark.parametrize("rule", Rule)
def test_a_query_with_gaps_is_read_where_it_lies(rule, variant):
    spec, wanted = spec_of(rule), Wanted(60, 4, 8)
    segments, query = case(spec, 700)
    golden = golden_sets(spec, Scope.LAYER, (segments, query), 0, wanted)
    rows = torch.full((6, 3, 24), torch.nan)
    rows[:, 1] = query
    columns = torch.full((6, 48), torch.nan)
    columns[:, ::2] = query
    scorer = native_scorer(variant, spec, Scope.LAYER)
    for apart in (rows[:, 1], columns[:, ::2]):
        assert not apart.is_contiguous()
        assert_same_sets(scorer.choose(apart, SCALING, segments, 0, [wanted])[0], golden)


@every_variant
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    ("value", "scaling"),
    [(torch.nan, 1.0), (torch.inf, 1.0), (-torch.inf, 0.5), (3e38, 4.0), (0.0, torch.inf)],
)
def test_a_query_that_is_not_finite_is_refused(value, scaling, rule, variant):
    spec, wanted = spec_of(rule), Wanted(60, 4, 8)
    segments, query = case(spec, 700)
    scorer = native_scorer(variant, spec, Scope.LAYER)
    query[4, 7] = value
    with pytest.raises(NonFiniteQueryError, match="infinity or a NaN"):
        scorer.choose(query, scaling, segments, 0, [wanted])[0]
    query[4, 7] = 1.0
    scorer.choose(query, 1.0, segments, 0, [wanted])[0]


@pytest.mark.parametrize(
    ("wanted", "coming", "text"),
    [
        (Wanted(11, 4, 8), 0, "count=11 is outside 12"),
        (Wanted(101, 4, 8), 0, "count=101"),
        (Wanted(12, -1, 8), 0, "sinks=-1"),
        (Wanted(12, 1, 0), 1, "coming=1"),
    ],
)
def test_what_cannot_be_had_is_refused(wanted, coming, text):
    with pytest.raises(ValueError, match=text):
        wanted.check(100, coming)
    Wanted(12, 4, 8).check(100, coming)


@every_variant
def test_threads_choose_the_same(variant):
    # Enough shadow that a third thread is worth waking.
    spec, wanted = KernelSpec(128, 8, 1, KeyMode.INT8), Wanted(60, 4, 8)
    segments, query = case(spec, 3500)
    assert sum(segment.shadow.nbytes for segment in segments) > 3 << 20
    scorer = native_scorer(variant, spec, Scope.KV_HEAD)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(scorer.choose(query, SCALING, segments, 1, [wanted])[0])
    finally:
        torch.set_num_threads(before)
    assert_same_sets(found[0], found[1])


@every_variant
def test_the_second_choice_looks_at_the_last_segment_and_notices_others(variant):
    """Full segments are described once; whatever else comes in their place is looked at anew."""
    spec, wanted = spec_of(), Wanted(60, 4, 8)
    segments, query = case(spec, 1500)
    scorer = native_scorer(variant, spec, Scope.LAYER)

    def chosen(own):
        return scorer.choose(query, SCALING, own, 0, [wanted])[0]

    first = chosen(segments)
    assert_same_sets(chosen(segments), first)
    others, _ = case(spec, 1500, 7)
    mixed = [segments[0], others[1], segments[2]]
    assert_same_sets(chosen(mixed), golden_sets(spec, Scope.LAYER, (mixed, query), 0, wanted))
    with pytest.raises(AssertionError):
        assert_same_sets(chosen(mixed), first)
    assert_same_sets(chosen(segments), first)
    shorter = [*segments[:2], replace(segments[2], tokens=300)]
    assert_same_sets(chosen(shorter), golden_sets(spec, Scope.LAYER, (shorter, query), 0, wanted))
    for wrong in (
        [segments[0], segments[1], segments[1]],
        [segments[0], segments[2]],
        [*segments[:2], replace(segments[2], tokens=513)],
        [*segments[:2], replace(segments[2], shadow=segments[2].shadow[:, :32])],
        segments[::-1],
    ):
        with pytest.raises(ValueError, match=r"segment|shadow"):
            chosen(wrong)


@every_variant
@pytest.mark.parametrize("coming", [0, 1])
def test_beyond_a_window_sets_are_those_of_all_tuples(coming, variant):
    spec = spec_of()
    (one,), query = case(spec, 512)
    segments = [replace(one, base_position=base) for base in range(0, 70_000, 512)]
    length = len(segments) * 512 + coming
    scorer = native_scorer(variant, spec, Scope.KV_HEAD)
    for count in (12 + coming, 7000, length - 1, length):
        wanted = Wanted(count, 4, 8)
        kept = kept_positions(length, 4, 8)
        kept = kept[: len(kept) - coming]
        newest = np.arange(length - coming, length)
        tuples = scorer.tuples(query, SCALING, segments, coming)
        expected = [
            np.append(select_positions(own, count - coming, kept), newest)
            for own in (tuples >> 16).astype(np.uint16)
        ]
        assert_same_sets(scorer.choose(query, SCALING, segments, coming, [wanted])[0], expected)
        if count == 7000:
            with pytest.raises(AssertionError):
                assert_same_sets(expected[::-1], expected)
