# SPDX-License-Identifier: Apache-2.0
"""A prompt's attention in C++: exact, in place, and the same bits whoever is beside a query."""

from itertools import pairwise

import pytest
import torch
from exact_attention import causal, exact_attention, random_states
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import every_variant, require_variant

from hillinfer.attention.kernels import FEWEST_ROWS, PromptMerge, is_worthwhile

SCALING = 0.3
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def merged(variant, query, keys, values, cuts=(), scaling=SCALING):
    """Attention of queries to what is past, cut into blocks, and to their own tokens."""
    past = keys.shape[1] - query.shape[1]
    merge = PromptMerge(query, scaling, variant)
    for start, stop in pairwise(sorted({0, past, *(cut for cut in cuts if cut < past)})):
        merge.add_block(keys[:, start:stop], values[:, start:stop])
    merge.add_causal(keys[:, past:], values[:, past:])
    return merge.result()


@every_variant
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 12, 64, 80, 128, 256])
@pytest.mark.parametrize(
    ("heads", "past", "queries"), [((6, 2), 0, 1), ((4, 1), 70, 37), ((3, 3), 600, 300)], ids=str
)
def test_it_is_exact_attention(variant, dtype, head_dim, heads, past, queries):
    require_variant(variant)
    states = random_states(1, *heads, queries, past + queries, head_dim)
    query, keys, values = states[0], *(one.to(dtype) for one in states[1:])
    scaling = 1.5 * head_dim**-0.5
    expected, _ = exact_attention(query, keys, values, scaling, causal(queries, past + queries))
    found = merged(variant, query, keys, values, (257, 300), scaling)
    assert (found.double() - expected).abs().max() < 1e-4
    # The twin: a bit of one key that all see.
    keys[0, 0] = -keys[0, 0]
    again = merged(variant, query, keys, values, (257, 300), scaling)
    assert queries + past == 1 or (again - found).abs().max() > 1e-3


@every_variant
def test_any_cut_gives_the_one_shot_result(variant):
    require_variant(variant)

    @settings(max_examples=30, deadline=None)
    @given(
        past=st.integers(0, 700),
        cuts=st.sets(st.integers(1, 700), max_size=5),
        queries=st.integers(1, 60),
        heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
        seed=st.integers(0, 1000),
    )
    def check(past, cuts, queries, heads, seed):
        states = random_states(seed, *heads, queries, past + queries, 16)
        expected, _ = exact_attention(*states, SCALING, causal(queries, past + queries))
        found = merged(variant, *states, cuts)
        assert (found.double() - expected).abs().max() < 1e-4

    check()


@every_variant
@settings(max_examples=20, deadline=None)
@given(
    queries=st.integers(2, 200),
    cuts=st.sets(st.integers(1, 199), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_queries_own_tokens_in_pieces(variant, queries, cuts, seed):
    require_variant(variant)
    query, keys, values = random_states(seed, 4, 2, queries, queries, 16)
    merge = PromptMerge(query, SCALING, variant)
    for start, stop in pairwise(sorted({0, queries, *(cut for cut in cuts if cut < queries)})):
        merge.add_causal(keys[:, start:stop], values[:, start:stop], start)
        if stop < queries:
            merge.add_block(keys[:, start:stop], values[:, start:stop], stop)
    expected, _ = exact_attention(query, keys, values, SCALING, causal(queries, queries))
    assert (merge.result().double() - expected).abs().max() < 1e-4


@every_variant
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_depend_on_a_querys_own_blocks_alone(variant, threads):
    require_variant(variant)
    query, keys, values = random_states(3, 6, 2, 101, 500, 64)

    def to_past(own, own_keys=keys):
        merge = PromptMerge(own, SCALING, variant)
        merge.add_block(own_keys, values)
        return merge.result()

    whole, before = to_past(query), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(to_past(query), whole)
        for first, stop in [(0, 1), (5, 40), (77, 101)]:
            assert torch.equal(to_past(query[:, first:stop]), whole[:, first:stop])
    finally:
        torch.set_num_threads(before)
    changed = keys.clone()
    changed[1, 499, 0] += 0.5
    found = to_past(query, changed)
    assert torch.equal(found[:3], whole[:3])
    assert not torch.equal(found[3:], whole[3:])


@every_variant
def test_states_lie_where_rows_and_models_have_them(variant):
    require_variant(variant)
    query, keys, values = random_states(4, 4, 2, 50, 90, 24)
    expected = merged(variant, query, keys, values)
    rows = torch.stack([keys, values]).permute(2, 0, 1, 3).contiguous()
    views = rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)
    assert not views[0].is_contiguous()
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(merged(variant, turned, *views), expected)
    gaps = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert gaps.stride(2) != 1
    assert torch.equal(merged(variant, query, gaps, values), expected)


@every_variant
@pytest.mark.parametrize("shift", [-500.0, 0.0, 500.0])
def test_blocks_of_very_different_weight(variant, shift):
    """A block may hold all of the mass or none of it; neither overflows."""
    require_variant(variant)
    query, keys, values = random_states(6, 2, 2, 2, 40, 8)
    query[..., 0] = 1.0
    keys[:, 20:38, 0] += shift
    expected, _ = exact_attention(query, keys, values, 1.0, causal(2, 40))
    found = merged(variant, query, keys, values, (10, 20, 30), 1.0)
    assert (found.double() - expected).abs().max() < 1e-4


@every_variant
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
def test_what_is_no_number_stays_none(variant, which, number):
    """And in the rows alone of those that see it."""
    require_variant(variant)
    query, keys, values = states = random_states(7, 2, 1, 40, 40, 8)
    good = merged(variant, query, keys, values)
    states[which][0, 20, 3] = number
    found = merged(variant, query, keys, values)
    assert torch.equal(found[:, :20], good[:, :20])
    expected, _ = exact_attention(query, keys, values, SCALING, causal(40, 40))
    assert torch.equal(found[:, 20:].isfinite(), expected[:, 20:].isfinite())
    assert not found[:, 20:].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_result_has_the_querys_type(dtype):
    query, keys, values = random_states(8, 4, 2, 30, 60, 8, dtype)
    expected, _ = exact_attention(query, keys, values, SCALING, causal(30, 60))
    found = merged(None, query, keys, values)
    assert found.dtype is dtype
    assert (found.double() - expected).abs().max() < (1e-4 if dtype is torch.float32 else 3e-2)


def test_attention_over_nothing_is_an_error():
    with pytest.raises(ValueError, match="add a block first"):
        PromptMerge(torch.zeros(1, 1, 8), 1.0).result()


def test_few_queries_are_left_to_torch():
    assert is_worthwhile(torch.zeros(4, FEWEST_ROWS // 2, 8), 2)
    assert not is_worthwhile(torch.zeros(4, FEWEST_ROWS // 2 - 1, 8), 2)
    assert not is_worthwhile(torch.zeros(4, FEWEST_ROWS, 8, device="meta"), 2)
