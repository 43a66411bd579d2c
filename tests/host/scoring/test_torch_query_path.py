# SPDX-License-Identifier: Apache-2.0
"""Query codes and mean corrections of the torch scorer against the golden model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scorer_cases import any_statistics, flip_bit, plain_query
from twins.query_path import code_query, scale_query

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Rule
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.query_codes import encode_query

SHAPES = [(1, 1, 16), (3, 3, 64), (2, 7, 80), (1, 64, 1), (40, 1, 128), (1, 2, 256)]


def my_codes(spec, query, scaling, statistics):
    return code_query(scale_query(spec, query, scaling), statistics)


def assert_same_queries(mine, spec, query, scaling, statistics):
    for segment, own in enumerate(statistics):
        golden = encode_query(query.numpy(), own, scaling, spec)
        codes = mine.codes[segment].numpy()
        assert np.array_equal(codes.reshape(spec.scored_heads, -1), golden.codes)
        assert np.array_equal(mine.exponents[segment].numpy().reshape(-1), golden.exponents)
        assert np.array_equal(mine.offsets[segment].numpy().reshape(-1), golden.corrections)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(("kv_heads", "group_size", "head_dim"), SHAPES)
def test_equal_golden(rule, kv_heads, group_size, head_dim):
    spec = KernelSpec(head_dim, kv_heads, group_size, rule=rule)
    statistics = [any_statistics(seed, kv_heads, head_dim) for seed in range(4)]
    for seed, scale in enumerate((1.0, 1e-3, 1e30, 1e-37, 1e-44, 0.0)):
        query = plain_query(seed, spec, scale)
        for scaling in (head_dim**-0.5, 1.0, -0.3, 1e-4):
            mine = my_codes(spec, query, scaling, statistics)
            assert_same_queries(mine, spec, query, scaling, statistics)


@pytest.mark.parametrize("part", ["codes", "exponents", "offsets"])
@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_is_noticed(part, seed):
    spec = KernelSpec(16, 2, 3)
    statistics = [any_statistics(seed, 2, 16)]
    query = plain_query(seed, spec)
    mine = my_codes(spec, query, 0.25, statistics)
    # Nothing of a query is zero here, so no flip can turn a 0 into the equal -0.
    assert all(bool((values != 0).all()) for values in (mine.offsets, mine.exponents))
    flip_bit(getattr(mine, part).numpy(), seed)
    with pytest.raises(AssertionError):
        assert_same_queries(mine, spec, query, 0.25, statistics)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    st.floats(-4, 4),
    st.integers(0, 2**20),
    st.sampled_from(Rule),
)
def test_any_query(values, scaling, seed, rule):
    spec = KernelSpec(2, 1, 6, rule=rule)
    query = torch.from_numpy(np.resize(np.array(values, dtype=np.float32), (6, 2)))
    statistics = [any_statistics(seed, 1, 2)]
    try:
        golden_refuses = not encode_query(query.numpy(), statistics[0], scaling, spec)
    except NonFiniteQueryError:
        golden_refuses = True
    if golden_refuses:
        with pytest.raises(NonFiniteQueryError):
            scale_query(spec, query, scaling)
    else:
        mine = my_codes(spec, query, scaling, statistics)
        assert_same_queries(mine, spec, query, scaling, statistics)


def test_queries_are_summed_in_ascending_order():
    """2^60 + 1 - 2^60 is 0 or 1 by order in float64; float32 would lose 2^30 + 1 already."""
    spec = KernelSpec(1, 1, 3, rule=Rule.RAW_SUM)
    for values, total in (
        ([2.0**60, 1, -(2.0**60)], 0),
        ([2.0**60, -(2.0**60), 1], 1),
        ([2.0**30, 1, -(2.0**30)], 1),
    ):
        query = torch.tensor(values).reshape(3, 1)
        scaled = scale_query(spec, query, 1.0)
        assert scaled.item() == np.float32(total) * np.float32(1.4426950408889634)


def test_exponents_end_where_int8_does():
    """The largest query and channel exponent ask for 137, the smallest for -169."""
    spec = KernelSpec(2, 1, 1)
    for value, exponent, limit in ((3e38, 16, 127), (1e-45, -14, -128)):
        query = torch.tensor([[value, value / 2]])
        statistics = [
            ChannelStatistics(np.full((1, 2), exponent, np.int8), np.ones((1, 2), np.int32))
        ]
        mine = my_codes(spec, query, 0.69, statistics)
        assert mine.exponents.item() == limit
        assert_same_queries(mine, spec, query, 0.69, statistics)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_queries_are_refused(rule, wrong):
    spec = KernelSpec(16, 2, 2, rule=rule)
    for head in range(spec.query_heads):
        query = plain_query(1, spec)
        query[head, 5] = wrong
        with pytest.raises(NonFiniteQueryError):
            scale_query(spec, query, 0.25)


def test_queries_that_become_infinite_are_refused():
    spec = KernelSpec(1, 1, 2)
    query = torch.tensor([[3e38], [1.0]])
    with pytest.raises(NonFiniteQueryError):
        scale_query(spec, query, 1.0)
    with pytest.raises(NonFiniteQueryError):
        scale_query(spec, query, float("inf"))
    assert scale_query(spec, query, 0.5).isfinite().all()
    summed = KernelSpec(1, 1, 2, rule=Rule.RAW_SUM)
    with pytest.raises(NonFiniteQueryError):
        scale_query(summed, torch.tensor([[3e38], [3e38]]), 0.1)
