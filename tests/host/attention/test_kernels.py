# SPDX-License-Identifier: Apache-2.0
"""Attention of some queries to one block, on the CPU's kernel and on the one of other devices."""

import pytest
import torch
from exact_attention import causal, exact_attention, random_states

from hillinfer.attention.kernels import attend_block, attend_causal, attend_explicitly

HEADS = [(4, 4), (4, 2), (4, 1), (6, 3)]
# Of outputs near 1, and of log-sum-exp, whose exponential is an approximation in BF16.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-4)}


def explicit(query, keys, values, scaling, hidden=None):
    """Run the kernel of other devices here, with the heads laid out as its callers do."""
    group_size = query.shape[0] // keys.shape[0]
    keys, values = (states.repeat_interleave(group_size, 0) for states in (keys, values))
    return attend_explicitly(query, keys, values, scaling, hidden)


def check(found, expected, dtype):
    (out, log_sum), (exact_out, exact_log_sum) = found, expected
    assert log_sum.dtype == torch.float32
    assert (out.double() - exact_out).abs().max() < TOLERANCE[dtype][0]
    assert (log_sum.double() - exact_log_sum).abs().max() < TOLERANCE[dtype][1]
    assert out.shape == exact_out.shape


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (1, 100), (37, 64), (64, 3)])
def test_a_block_that_every_query_sees(heads, dtype, queries, tokens):
    query, keys, values = random_states(1, *heads, queries, tokens, 12, dtype)
    expected = exact_attention(query, keys, values, 0.3)
    check(attend_block(query, keys, values, 0.3), expected, dtype)
    check(explicit(query, keys, values, 0.3), expected, dtype)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 37, 64])
def test_a_block_of_the_queries_own_tokens(heads, dtype, tokens):
    query, keys, values = random_states(2, *heads, tokens, tokens, 12, dtype)
    expected = exact_attention(query, keys, values, 0.3, causal(tokens, tokens))
    check(attend_causal(query, keys, values, 0.3), expected, dtype)
    check(explicit(query, keys, values, 0.3, ~causal(tokens, tokens)), expected, dtype)


def test_a_causal_block_is_not_one_that_every_query_sees():
    query, keys, values = random_states(2, 4, 2, 37, 37, 12)
    assert not torch.allclose(
        attend_causal(query, keys, values, 0.3)[0], attend_block(query, keys, values, 0.3)[0]
    )


def test_strided_states_as_they_come_from_rows():
    query, keys, values = random_states(3, 4, 2, 5, 50, 8)
    rows = torch.stack([keys, values]).permute(2, 0, 1, 3).contiguous()
    views = rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)
    assert not views[0].is_contiguous()
    check(
        attend_block(query, *views, 0.3), exact_attention(query, keys, values, 0.3), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_explicit_kernel_rounds_no_inner_product(dtype):
    """Inner products of half a million that differ by little still rank as they should."""
    query, keys, values = random_states(4, 4, 2, 3, 40, 64, dtype)
    query, keys = query * 60, keys * 60
    expected = exact_attention(query, keys, values, 1e-4)
    assert (query.float() @ keys.repeat_interleave(2, 0).float().transpose(1, 2)).max() > 65_504
    check(explicit(query, keys, values, 1e-4), expected, torch.float32)
