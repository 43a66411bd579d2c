# SPDX-License-Identifier: Apache-2.0
"""Attention block by block equals attention in one shot, however rows are cut."""

from itertools import pairwise

import pytest
import torch
from exact_attention import causal, exact_attention, random_states
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.attention.kernels import SoftmaxMerge, attend_block, attend_explicitly


def explicit_block(query, keys, values, scaling):
    heads, queries, head_dim = query.shape
    packed = query.reshape(keys.shape[0], -1, head_dim)
    out, log_sum = attend_explicitly(packed, keys, values, scaling, None)
    return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)


@st.composite
def cut_rows(draw):
    tokens = draw(st.integers(1, 120))
    cuts = sorted(draw(st.sets(st.integers(1, tokens), max_size=8)) | {0, tokens})
    return tokens, list(pairwise(cuts))


@pytest.mark.parametrize("kernel", [attend_block, explicit_block])
def test_any_cut_gives_the_one_shot_result(kernel):
    @settings(max_examples=40, deadline=None)
    @given(
        rows=cut_rows(),
        heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
        queries=st.integers(1, 5),
        seed=st.integers(0, 1000),
        scaling=st.sampled_from([0.01, 0.3, 1.0]),
    )
    def check(rows, heads, queries, seed, scaling):
        tokens, blocks = rows
        query, keys, values = random_states(seed, *heads, queries, tokens, 8)
        merge = SoftmaxMerge(query, scaling, kernel)
        for start, stop in blocks:
            merge.add_block(keys[:, start:stop], values[:, start:stop])
        expected, _ = exact_attention(query, keys, values, scaling)
        assert (merge.result().double() - expected).abs().max() < 1e-4

    check()


@settings(max_examples=40, deadline=None)
@given(
    rows=cut_rows(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    queries=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_past_blocks_and_the_queries_own_tokens(rows, heads, queries, seed):
    past, blocks = rows
    query, keys, values = random_states(seed, *heads, queries, past + queries, 8)
    merge = SoftmaxMerge(query, 0.3)
    for start, stop in blocks:
        merge.add_block(keys[:, start:stop], values[:, start:stop])
    merge.add_causal(keys[:, past:], values[:, past:])
    expected, _ = exact_attention(query, keys, values, 0.3, causal(queries, past + queries))
    assert (merge.result().double() - expected).abs().max() < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    past=st.integers(0, 30),
    rows=cut_rows(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    seed=st.integers(0, 1000),
)
def test_the_queries_own_tokens_in_pieces(past, rows, heads, seed):
    queries, pieces = rows
    query, keys, values = random_states(seed, *heads, queries, past + queries, 8)
    merge = SoftmaxMerge(query, 0.3)
    if past:
        merge.add_block(keys[:, :past], values[:, :past])
    for start, stop in pieces:
        own = slice(past + start, past + stop)
        merge.add_causal(keys[:, own], values[:, own], start)
        if stop < queries:
            merge.add_block(keys[:, own], values[:, own], stop)
    expected, _ = exact_attention(query, keys, values, 0.3, causal(queries, past + queries))
    assert (merge.result().double() - expected).abs().max() < 1e-4


def test_a_piece_that_later_queries_miss_is_noticed():
    query, keys, values = random_states(8, 4, 2, 40, 40, 8)
    merge = SoftmaxMerge(query, 0.3)
    merge.add_causal(keys[:, :20], values[:, :20])
    merge.add_causal(keys[:, 20:], values[:, 20:], 20)
    expected, _ = exact_attention(query, keys, values, 0.3, causal(40, 40))
    assert (merge.result().double() - expected)[:, :20].abs().max() < 1e-4
    assert (merge.result().double() - expected)[:, 20:].abs().max() > 1e-3


def test_a_block_left_out_is_noticed():
    query, keys, values = random_states(5, 4, 2, 3, 60, 8)
    merge = SoftmaxMerge(query, 0.3)
    merge.add_block(keys[:, :50], values[:, :50])
    expected, _ = exact_attention(query, keys, values, 0.3)
    assert (merge.result().double() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("shift", [-500.0, 0.0, 500.0])
def test_blocks_of_very_different_weight(shift):
    """A block may hold all of the mass or none of it; neither overflows."""
    query, keys, values = random_states(6, 2, 2, 2, 40, 8)
    query[..., 0] = 1.0
    keys[:, 20:, 0] += shift
    merge = SoftmaxMerge(query, 1.0)
    for start in (0, 10, 20, 30):
        merge.add_block(keys[:, start : start + 10], values[:, start : start + 10])
    expected, _ = exact_attention(query, keys, values, 1.0)
    assert (merge.result().double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("light_first", [True, False])
def test_a_block_that_weighs_a_thousandth_counts(light_first):
    query = torch.ones(1, 1, 8)
    keys, values = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    keys[0, :, 0] = torch.tensor([0.0, 7.5] if light_first else [7.5, 0.0])
    values[0, 0 if light_first else 1] = 1000.0
    merge = SoftmaxMerge(query, 1.0)
    for row in range(2):
        merge.add_block(keys[:, row : row + 1], values[:, row : row + 1])
    expected, _ = exact_attention(query, keys, values, 1.0)
    assert 0.5 < expected.min() < 0.6
    assert (merge.result().double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_has_the_querys_type(dtype):
    query, keys, values = random_states(7, 4, 2, 3, 60, 8, dtype)
    merge = SoftmaxMerge(query, 0.3)
    for start in (0, 20, 40):
        merge.add_block(keys[:, start : start + 20], values[:, start : start + 20])
    assert merge.result().dtype == dtype
    expected, _ = exact_attention(query, keys, values, 0.3)
    assert (merge.result().double() - expected).abs().max() < 3e-2


def test_attention_over_nothing_is_an_error():
    with pytest.raises(ValueError, match="add a block first"):
        SoftmaxMerge(torch.zeros(1, 1, 8), 1.0).result()
