# SPDX-License-Identifier: Apache-2.0
"""A predicted query: N counts the token that comes, whose key nobody has (contract, section 6)."""

from itertools import product

import numpy as np
import pytest
import torch
from native_variants import VARIANTS, native_scorer
from pairwise import pairwise
from scorer_cases import assert_same_tuples, plain_keys, plain_query, segments_of
from test_native_scorer import streamed, with_copies
from twins.query_path import offset_tokens
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import reference_positions

# Around where a token leaves the 256 most recent ones and where a probe token appears.
LENGTHS = [1, 4, 5, 16, 254, 255, 256, 259, 260, 261, 270, 271, 272, 273, 287, 288, 700]


def spec_of(rule):
    return KernelSpec(24, 2, 3, KeyMode.INT4, rule=rule, segment_tokens=512)


def golden_tuples(spec, scope, segments, query, coming):
    return GoldenScorer(spec, scope).tuples(query, 0.1, segments, coming)


def case(spec, tokens):
    keys = plain_keys(tokens, tokens, spec.kv_heads, spec.head_dim)
    return segments_of(TorchScorer(spec, Scope.LAYER), keys), plain_query(tokens, spec)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_offset_tokens_are_those_of_one_token_more(tokens):
    recent, probes = reference_positions(tokens, 1)
    mine = offset_tokens(torch.arange(tokens).view(1, -1), 1)[0].numpy()
    np.testing.assert_array_equal(mine, np.concatenate([recent, probes]))
    later, later_probes = reference_positions(tokens + 1)
    np.testing.assert_array_equal(recent, later[later < tokens])
    np.testing.assert_array_equal(probes, later_probes)


@pytest.mark.parametrize("coming", [-1, 2])
def test_only_one_token_comes_at_a_time(coming):
    with pytest.raises(ValueError, match=f"coming={coming}"):
        reference_positions(5, coming)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_torch_equals_golden(tokens, scope, rule):
    spec = spec_of(rule)
    segments, query = case(spec, tokens)
    golden = golden_tuples(spec, scope, segments, query, 1)
    assert_same_tuples(TorchScorer(spec, scope).tuples(query, 0.1, segments, 1), golden)


@pytest.mark.parametrize(
    ("tokens", "scores", "variant"), pairwise([LENGTHS, list(product(Rule, Scope)), list(VARIANTS)])
)
def test_native_equals_golden(tokens, scores, variant):
    rule, scope = scores
    spec = spec_of(rule)
    scorer = native_scorer(variant, spec, scope)
    segments, query = case(spec, tokens)
    golden = golden_tuples(spec, scope, segments, query, 1)
    for own in (segments, with_copies(spec, segments), streamed(segments)):
        assert_same_tuples(scorer.tuples(query, 0.1, own, 1), golden)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("scorer", [GoldenScorer, TorchScorer])
def test_a_token_that_is_coming_changes_scores(scorer, rule):
    spec = spec_of(rule)
    segments, query = case(spec, 700)
    made = scorer(spec, Scope.LAYER)
    with pytest.raises(AssertionError):
        assert_same_tuples(made.tuples(query, 0.1, segments, 1), made.tuples(query, 0.1, segments))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("tokens", [40, 261, 700])
def test_the_coming_token_is_selected_as_the_newest_kept_one(tokens, scope):
    spec = spec_of(Rule.WEIGHT_SUM)
    segments, query = case(spec, tokens)
    settings = Settings().changed(alpha=0.2, kept_recent=7, kept_sinks=2)
    golden = ImportanceEvaluation(GoldenScorer(spec, scope), settings)
    sets = golden.select(query, 0.1, segments, 1)
    count = max(int((tokens + 1) * 0.2 + 0.5), 10)
    for own in sets:
        assert len(own) == count
        np.testing.assert_array_equal(own[-7:], np.arange(tokens - 6, tokens + 1))
        assert (np.diff(own) > 0).all()
    for scorer in (TorchScorer(spec, scope), NativeScorer(spec, scope)):
        for mine, own in zip(
            ImportanceEvaluation(scorer, settings).select(query, 0.1, segments, 1),
            sets,
            strict=True,
        ):
            np.testing.assert_array_equal(mine, own)
