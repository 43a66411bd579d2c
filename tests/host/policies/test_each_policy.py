# SPDX-License-Identifier: Apache-2.0
"""What each selection policy ranks by, against a restatement that is slow and plain."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_cases import (
    GROUP_SIZE,
    HEAD_DIM,
    KV_HEADS,
    POLICIES,
    assert_same_sets,
    contract,
    some_layer,
    some_settings,
)

from hillinfer.devices.opening import GoldenScorer
from hillinfer_bench.quality.policies import PAGE_TOKENS, Pages, RecentOnly
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import kept_positions, select_positions, selected_count


def plain_best(scores, length, settings):
    """Rank positions by (score descending, position ascending), kept ones first."""
    kept = set(kept_positions(length, settings.kept_sinks, settings.kept_recent).tolist())
    count = selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)
    order = sorted(range(length), key=lambda p: (p not in kept, -scores[p], p))
    return sorted(order[:count])


def plain_weights(layer, i, length):
    """Softmax weights in float64, (KV head, query head of it, length)."""
    weights = np.zeros((KV_HEADS, GROUP_SIZE, length))
    for head in range(KV_HEADS * GROUP_SIZE):
        kv_head = head // GROUP_SIZE
        products = layer.keys[:length, kv_head].double() @ layer.queries[i, head].double()
        weights[kv_head, head % GROUP_SIZE] = torch.softmax(products * layer.scaling, 0)
    return weights


@pytest.mark.parametrize("scope", Scope)
def test_float_weights_are_summed_softmax_weights(scope):
    settings = some_settings(scope=scope)
    layer = some_layer(200, 5)
    selected = POLICIES[f"float-{scope.value}"](settings).select(layer)
    for i, length in enumerate(layer.lengths):
        sums = plain_weights(layer, i, length).sum(1)
        rows = sums if scope is Scope.KV_HEAD else sums.sum(0, keepdims=True)
        assert selected[i].tolist() == [plain_best(row, length, settings) for row in rows]


def test_pages_are_ranked_by_their_bounds():
    settings = some_settings(alpha=0.3)
    layer = some_layer(PAGE_TOKENS * 6 + 5, 25)
    selected = Pages(settings).select(layer)
    for i, length in enumerate(layer.lengths):
        for kv_head in range(KV_HEADS):
            scores = []
            for start in range(0, length, PAGE_TOKENS):
                page = layer.keys[start : min(start + PAGE_TOKENS, length), kv_head].float()
                least, largest = page.amin(0), page.amax(0)
                queries = layer.queries[i, kv_head * GROUP_SIZE : (kv_head + 1) * GROUP_SIZE]
                bound = torch.maximum(queries * least, queries * largest).double().sum()
                scores += [round(float(bound), 3)] * len(page)
            assert selected[i][kv_head].tolist() == plain_best(scores, length, settings)


def test_pages_are_taken_whole():
    """Apart from kept tokens, only one page is cut."""
    settings = some_settings(alpha=0.3, kept_sinks=0, kept_recent=1)
    for positions in Pages(settings).select(some_layer(PAGE_TOKENS * 40, 1))[0]:
        pages = np.bincount(positions // PAGE_TOKENS, minlength=40)
        cut = [page for page in np.flatnonzero(pages) if pages[page] < PAGE_TOKENS]
        assert len(cut) <= 2
        assert (pages == PAGE_TOKENS).sum() >= math.floor(0.3 * 40) - 1


def test_recent_only_is_a_window_with_sinks():
    (positions,) = RecentOnly(some_settings(alpha=0.1)).select(some_layer(100, 1))
    assert positions.tolist() == [[0, 1, *range(92, 100)]]


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("shadow", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
def test_contract_selection_is_the_golden_model(shadow, rule, scope):
    settings = some_settings(rule=rule, shadow=shadow, scope=scope)
    layer = some_layer(700, 1)
    spec = KernelSpec(HEAD_DIM, KV_HEADS, GROUP_SIZE, shadow, rule, segment_tokens=512)
    golden = GoldenModel(spec, scope)
    segments = golden.encode_sequence(layer.keys.numpy().view(np.uint16))
    codes = golden.score(layer.queries[0].numpy(), layer.scaling, segments)
    kept = kept_positions(700, settings.kept_sinks, settings.kept_recent)
    expected = [select_positions(row, policy_count(settings, 700), kept) for row in codes]
    (selected,) = contract(rule=rule, shadow=shadow, scope=scope)(settings).select(layer)
    assert np.array_equal(selected, np.stack(expected))


def policy_count(settings, length):
    return selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)


# Queries that open the first segment, a later one, and that find a later one short or half full.
@pytest.mark.parametrize(("tokens", "queries"), [(45, 40), (530, 40), (700, 30), (800, 10)])
@pytest.mark.parametrize("shadow", ["int8", "int2"])
def test_both_scorers_select_the_same(shadow, tokens, queries):
    settings, layer = some_settings(), some_layer(tokens, queries)
    mine = contract(shadow=shadow)(settings).select(layer)
    golden = contract(GoldenScorer, shadow=shadow)(settings).select(layer)
    assert_same_sets(mine, golden)


def test_a_flipped_bit_of_a_key_is_noticed():
    settings, layer = some_settings(), some_layer(700, 3)
    before = contract(shadow="int8")(settings).select(layer)
    keys = layer.keys.clone()
    # The upper bit of the exponent of a key that is neither selected nor kept.
    outside = np.setdiff1d(np.arange(600), before[0][0])[100]
    keys.view(torch.int16)[outside] ^= 1 << 14
    with pytest.raises(AssertionError):
        assert_same_sets(
            contract(shadow="int8")(settings).select(replace(layer, keys=keys)), before
        )
