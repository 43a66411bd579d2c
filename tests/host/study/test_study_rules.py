# SPDX-License-Identifier: Apache-2.0
"""What the rivals' rules choose, against restatements that are slow and plain."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings
from hillinfer_bench.frontier.rival_rules import InfiniGenRule
from hillinfer_bench.quality.policies import FloatWeights, LayerQueries
from hillinfer_bench.study.rules import (
    Chunks,
    HeavyHitters,
    QuantisedCache,
)
from hillinfer_bench.study.ways import ALL_KEYS, INFINIGEN, MIXED, SYSTEMS, study_ways

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 32
SETTINGS = Settings().changed(alpha=0.1, kept_sinks=2, kept_recent=5)


def some_layer(tokens, queries, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, KV_HEADS, HEAD_DIM, generator=generator)
    asked = torch.randn(queries, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    return LayerQueries(asked, keys.half(), HEAD_DIM**-0.5)


def split(layer, first):
    """Return the layer as two calls, the first queries in one."""
    behind = len(layer.queries) - first
    before = replace(layer, queries=layer.queries[:first], keys=layer.keys[:-behind])
    return before, replace(layer, queries=layer.queries[first:])


def plain_heavy_hitters(layer, observed, settings):
    """Keep by summed weights, head by head, in float64."""
    policy = FloatWeights(settings)
    chosen = []
    for head in range(KV_HEADS):
        held, weights, sets = list(range(layer.first_length - 1)), {}, []
        for i, length in enumerate(layer.lengths):
            held.append(length - 1)
            rows = layer.queries[i, head * GROUP : (head + 1) * GROUP].double()
            products = rows @ layer.keys[held, head].double().T * layer.scaling
            for place, weight in zip(held, torch.softmax(products, -1).sum(0), strict=True):
                weights[place] = weights.get(place, 0.0) + float(weight)
            sets.append(sorted(held))
            if i + 1 >= observed:
                kept = set(policy.kept(length).tolist())
                held.sort(key=lambda place, kept=kept: (place not in kept, -weights[place]))
                held = held[: policy.count(length)]
        chosen.append(sets)
    return [np.array(one) for one in zip(*chosen, strict=True)]


def test_h2o_keeps_the_heaviest_and_never_takes_a_dropped_token_back():
    layer = some_layer(150, 20)
    found = HeavyHitters(SETTINGS, observed=8).select(layer)
    expected = plain_heavy_hitters(layer, 8, SETTINGS)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    assert [one.shape[1] for one in found[:9]] == [*range(131, 139), 15]
    for before, after in pairwise(found[8:]):
        for head in range(KV_HEADS):
            assert set(after[head][:-1]) <= set(before[head])
    # With another number of observed queries others stay.
    other = HeavyHitters(SETTINGS, observed=4).select(layer)
    assert not np.array_equal(found[-1], other[-1])


def test_h2o_goes_on_with_what_it_holds():
    layer = some_layer(150, 20)
    policy = HeavyHitters(SETTINGS, observed=8)
    parts = [one for call in split(layer, 13) for one in policy.select(call)]
    whole = HeavyHitters(SETTINGS, observed=8).select(layer)
    for one, other in zip(parts, whole, strict=True):
        assert np.array_equal(one, other)
    # Another text begins anew.
    again = policy.select(layer)
    assert np.array_equal(again[-1], whole[-1])


def test_infinigen_ranks_by_the_channels_that_differ():
    generator = torch.Generator().manual_seed(1)
    channels = round(0.3 * HEAD_DIM)
    keys = 1e-3 * torch.randn(200, KV_HEADS, HEAD_DIM, generator=generator)
    keys[:, :, :channels] = torch.randn(200, KV_HEADS, channels, generator=generator)
    layer = replace(some_layer(200, 6), keys=keys)
    found = InfiniGenRule(SETTINGS).select(layer)
    for one, other in zip(found, FloatWeights(SETTINGS).select(layer), strict=True):
        assert np.array_equal(one, other)
    # Keys that differ in all channels do not fit into three in ten.
    full = some_layer(200, 6)
    partial, exact = (policy(SETTINGS).select(full)[-1] for policy in (InfiniGenRule, FloatWeights))
    assert not np.array_equal(partial, exact)
    assert len(np.intersect1d(partial, exact)) > len(exact) / 3


def test_infinigen_is_that_of_the_comparison_at_equal_quality():
    ways = [one for one in study_ways(HEAD_DIM) if one.name == INFINIGEN]
    shape = ModelShape(1, KV_HEADS, KV_HEADS * GROUP, HEAD_DIM, StoredType.FLOAT16, 1000)
    assert ways
    assert all(type(one.policy(shape)) is InfiniGenRule for one in ways)


def plain_chunks(layer, i, length, settings):
    """Split twice as many chunks as are wanted, then rank their pages."""

    def bounds(page):
        rows = []
        for head in range(KV_HEADS * GROUP):
            query, row = layer.queries[i, head], []
            for start in range(0, length, page):
                keys = layer.keys[start : min(start + page, length), head // GROUP].float()
                row.append(torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum())
            rows.append(torch.stack(row) * layer.scaling)
        return torch.stack(rows)

    policy = FloatWeights(settings)
    coarse, fine = bounds(64), bounds(16)
    pages = -(-policy.count(length) // 16)
    wanted = min(-(-2 * pages // 4), coarse.shape[1])
    best = torch.softmax(coarse, -1).sum(0).topk(wanted).indices.tolist()
    parts = [part for part in range(fine.shape[1]) if part // 4 in best]
    scores = dict(zip(parts, torch.softmax(fine[:, parts], -1).sum(0).tolist(), strict=True))
    kept = set(policy.kept(length).tolist())
    order = sorted(
        range(length),
        key=lambda place: (place not in kept, -scores.get(place // 16, -1.0), place),
    )
    return sorted(order[: policy.count(length)])


def test_leoam_splits_the_best_chunks():
    layer = some_layer(64 * 9 + 21, 4)
    for i, (one, length) in enumerate(
        zip(Chunks(SETTINGS).select(layer), layer.lengths, strict=True)
    ):
        assert one[0].tolist() == plain_chunks(layer, i, length, SETTINGS)
        assert one[0].tolist() != FloatWeights(SETTINGS).select(layer)[i][0].tolist()


def attend_plainly(layer, keys, values):
    """Attend to all tokens in float64."""
    heads = []
    for head in range(KV_HEADS * GROUP):
        own = layer.queries[:, head].double() @ keys[:, head // GROUP].double().T * layer.scaling
        for i, length in enumerate(layer.lengths):
            own[i, length:] = -torch.inf
        heads.append(torch.softmax(own, -1) @ values[:, head // GROUP].double())
    return torch.stack(heads)


def test_a_quantised_cache_attends_to_what_codes_stand_for():
    layer = some_layer(160, 1)
    values = some_layer(160, 1, seed=5).keys
    found = QuantisedCache(SETTINGS, 4).attend(layer, values)
    # 155 tokens are not recent: four groups of 32 are coded.
    keys, coded = layer.keys.float().clone(), values.float().clone()
    for group in range(0, 128, 32):
        for head in range(KV_HEADS):
            for channel in range(HEAD_DIM):
                column = keys[group : group + 32, head, channel]
                least = column.min().half().float()
                step = ((column.max() - column.min()) / 15).half().float()
                keys[group : group + 32, head, channel] = (
                    least + ((column - least) / step).round().clamp(0, 15) * step
                )
    for token in range(128):
        for head in range(KV_HEADS):
            row = coded[token, head]
            least, step = row.min().half().float(), ((row.max() - row.min()) / 15).half().float()
            coded[token, head] = least + ((row - least) / step).round().clamp(0, 15) * step
    expected = attend_plainly(layer, keys, coded)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    exact = attend_plainly(layer, layer.keys, values)
    errors = [
        float((QuantisedCache(SETTINGS, bits).attend(layer, values) - exact).abs().max())
        for bits in (8, 4, 2)
    ]
    assert errors[0] < 0.01 < errors[1] < errors[2]


def test_ways_at_equal_bytes_read_as_many_bytes():
    ways = study_ways(64)
    assert ways[0].name == "full cache"
    assert len({one.title for one in ways}) == len(ways)
    # .02 rows, .18 of 33 bytes over 256, and a shadow of 33 bytes over 256.
    expected = 0.02 + 0.18 * 33 / 256 + 33 / 256
    equal = [one for one in ways if one.setting == f"{expected:.1%} of the bytes"]
    assert len(equal) == len(SYSTEMS) - 1
    read = {one.name: one.rows + one.ranking for one in equal}
    assert read == pytest.approx(dict.fromkeys(read, expected))
    alphas = {one.name: one.configuration.settings.alpha for one in equal}
    assert alphas[MIXED] == pytest.approx(0.2)
    assert alphas["Quest"] == pytest.approx(expected - 1 / 16)
    assert alphas["H2O (others dropped)"] == pytest.approx(expected)
    assert {one.configuration.settings.alpha for one in ways if one.setting == "α = 0.1"} == {0.1}


def test_ways_at_the_bytes_of_a_quantised_cache_read_no_more():
    ways = study_ways(64)
    (four_bits,) = (one.rows for one in ways if one.name == "4-bit cache")
    equal = [one for one in ways if one.setting == f"{four_bits:.1%} of the bytes"]
    # All keys are half of a row, and all tokens by weight read less than that.
    assert {one.name for one in SYSTEMS} - {one.name for one in equal} == {ALL_KEYS, MIXED}
    for one in equal:
        assert one.rows + one.ranking == pytest.approx(four_bits)
    (whole,) = (one for one in ways if one.name == MIXED and one.configuration.settings.alpha == 1)
    everything = 0.02 + 0.98 * 33 / 256 + 33 / 256
    assert whole.rows + whole.ranking == pytest.approx(everything)
    assert whole.setting == f"{everything:.1%} of the bytes"
    assert everything < four_bits
