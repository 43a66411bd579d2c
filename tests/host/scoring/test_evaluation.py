# SPDX-License-Identifier: Apache-2.0
"""From a query and shadows to selected sets: both devices, all rules, scopes and block sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.devices.opening import make_scorer
from hillinfer.scoring.scorer import ImportanceEvaluation, SegmentShadow
from hillinfer.settings import Settings
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import selected_count

SCALING = 0.35
# The devices that score shadows in host memory.
DEVICES = ("nvme", "golden")


def spec_of(rule=Rule.WEIGHT_SUM, mode=KeyMode.INT4, block_tokens=1024, kv_heads=2):
    return KernelSpec(
        head_dim=8,
        kv_heads=kv_heads,
        group_size=2,
        key_mode=mode,
        rule=rule,
        segment_tokens=512,
        block_tokens=block_tokens,
    )


def states(spec, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, spec.kv_heads, spec.head_dim, generator=generator).half()
    query = torch.randn(spec.query_heads, spec.head_dim, generator=generator) * 1.5
    return keys, query


def segments_of(scorer, keys):
    segments, statistics = [], None
    length = scorer.spec.segment_tokens
    for base in range(0, len(keys), length):
        own = keys[base : base + length]
        statistics = scorer.statistics(own, base, statistics)
        shadow = np.zeros((scorer.spec.segment_beats, 64), np.uint8)
        scorer.encode(own, statistics, shadow, 0)
        segments.append(SegmentShadow(base, len(own), shadow, statistics))
    return segments


def select(device, spec, scope, tokens, chosen, seed=0):
    scorer = make_scorer(device, spec, scope)
    keys, query = states(spec, tokens, seed)
    evaluation = ImportanceEvaluation(scorer, chosen)
    return evaluation.select(query, SCALING, segments_of(scorer, keys))


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from(Rule),
    scope=st.sampled_from(Scope),
    mode=st.sampled_from([KeyMode.INT8, KeyMode.INT4, KeyMode.INT2]),
    tokens=st.integers(1, 1300),
    alpha=st.floats(0.001, 1.0),
    sinks=st.integers(0, 6),
    recent=st.integers(1, 40),
    most=st.none() | st.integers(1, 100),
    block_tokens=st.integers(1, 256),
    seed=st.integers(0, 100),
)
def test_devices_and_block_sizes_select_the_same(
    rule, scope, mode, tokens, alpha, sinks, recent, most, block_tokens, seed
):
    chosen = Settings().changed(
        alpha=alpha, kept_sinks=sinks, kept_recent=recent, max_selected=most
    )
    expected = select("golden", spec_of(rule, mode), scope, tokens, chosen, seed)
    for device in DEVICES:
        found = select(device, spec_of(rule, mode, block_tokens), scope, tokens, chosen, seed)
        assert len(found) == (1 if scope is Scope.LAYER else 2)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    count = selected_count(tokens, alpha, sinks + recent, most)
    for positions in expected:
        assert len(positions) == count
        assert (np.diff(positions) > 0).all()
        kept = {*range(min(sinks, tokens)), *range(max(0, tokens - recent), tokens)}
        assert kept <= set(positions.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_everything_is_selected_without_being_scored(device):
    """A query that cannot be scored shows that it is not."""
    spec = spec_of()
    scorer = make_scorer(device, spec, Scope.KV_HEAD)
    keys, query = states(spec, 100)
    segments = segments_of(scorer, keys)
    query[0, 0] = torch.nan
    everything = ImportanceEvaluation(scorer, Settings().changed(alpha=1.0))
    for positions in everything.select(query, SCALING, segments):
        np.testing.assert_array_equal(positions, np.arange(100))
    some = ImportanceEvaluation(scorer, Settings().changed(alpha=0.1))
    with pytest.raises(NonFiniteQueryError):
        some.select(query, SCALING, segments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", Rule)
def test_a_key_along_the_query_is_found(device, rule):
    spec = spec_of(rule)
    scorer = make_scorer(device, spec, Scope.LAYER)
    keys, query = states(spec, 700)
    keys[345] = query.view(2, 2, 8).sum(1).half()
    chosen = Settings().changed(alpha=0.01, kept_sinks=0, kept_recent=1)
    (found,) = ImportanceEvaluation(scorer, chosen).select(
        query, SCALING, segments_of(scorer, keys)
    )
    assert 345 in found.tolist()
    keys[345] = -keys[345]
    (found,) = ImportanceEvaluation(scorer, chosen).select(
        query, SCALING, segments_of(scorer, keys)
    )
    assert 345 not in found.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_in_scope_kv_head_each_head_ranks_by_its_own_queries(device):
    spec = spec_of()
    scorer = make_scorer(device, spec, Scope.KV_HEAD)
    keys, query = states(spec, 300)
    keys[100, 0] = query[:2].sum(0).half()
    keys[200, 1] = query[2:].sum(0).half()
    chosen = Settings().changed(alpha=0.02, kept_sinks=0, kept_recent=1)
    first, second = ImportanceEvaluation(scorer, chosen).select(
        query, SCALING, segments_of(scorer, keys)
    )
    assert 100 in first.tolist()
    assert 200 in second.tolist()
    assert not np.array_equal(first, second)


def test_lengths_in_any_order_select_as_if_each_were_the_first():
    """How much is wanted is remembered for one length only."""
    spec = spec_of()
    scorer = make_scorer("nvme", spec, Scope.KV_HEAD)
    keys, query = states(spec, 700)
    chosen = Settings().changed(alpha=0.2, kept_sinks=2, kept_recent=5)
    used = ImportanceEvaluation(scorer, chosen)
    sizes = []
    for tokens in (700, 300, 6, 300, 699, 700, 700):
        segments = segments_of(scorer, keys[:tokens])
        fresh = ImportanceEvaluation(scorer, chosen)
        assert used.selects_all(tokens) == fresh.selects_all(tokens) == (tokens == 6)
        for coming in (0, 1):
            mine = used.select(query, SCALING, segments, coming)
            for one, other in zip(
                mine, fresh.select(query, SCALING, segments, coming), strict=True
            ):
                np.testing.assert_array_equal(one, other)
            sizes.append(len(mine[0]))
    assert sizes == [140, 140, 60, 60, 6, 7, 60, 60, 140, 140, 140, 140, 140, 140]
