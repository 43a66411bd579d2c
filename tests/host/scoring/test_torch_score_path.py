# SPDX-License-Identifier: Apache-2.0
"""Weights, offsets and score codes of the torch scorer against the golden model."""

import numpy as np
import pytest
import torch
from twins.query_path import offset_tokens, raw_sum_offsets, weight_sum_offsets
from twins.score_codes import raw_sum_codes, weight_sum_codes, weights_in_place

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import offsets as golden_offsets
from hillinfer_model.offsets import reference_positions
from hillinfer_model.scores import mag, weight

LARGEST_WEIGHT = 2**48 - 1
# Around every power of two, and around the multiples where ten bits below the first one change.
EDGES = sorted(
    {
        max(value + step, 0)
        for exponent in range(49)
        for value in (2**exponent, 2**exponent * 1025 // 1024, 2**exponent * 2047 // 1024)
        for step in (-1, 0, 1)
    }
)


def test_weights_of_every_exponent():
    exponents = np.arange(-(40 << 8), 40 << 8)
    exponents = np.concatenate([exponents, [-(2**26), -(2**25), 2**25, 2**26]])
    mine = weights_in_place(torch.from_numpy(exponents.astype(np.int32)))
    golden = weight(exponents)
    limited = np.minimum(mine.numpy().astype(np.float64), LARGEST_WEIGHT)
    assert np.array_equal(limited, golden)
    assert not np.array_equal(np.roll(limited, 1), golden)


def test_codes_of_weight_sums():
    sums = np.array([edge for edge in EDGES if edge <= 2**48] + [2**53, 2**58], dtype=np.int64)
    mine = weight_sum_codes(torch.from_numpy(sums.astype(np.float64))).numpy()
    golden = 1 + mag(np.minimum(sums, LARGEST_WEIGHT))
    assert np.array_equal(mine, golden)
    assert not np.array_equal(mine ^ 1, golden)
    assert mine[-1] == 1 + mag(np.array([LARGEST_WEIGHT]))[0]


def test_codes_of_raw_sums():
    edges = np.array([edge for edge in EDGES if edge < 2**31], dtype=np.int64)
    values = np.concatenate([edges, -edges, [-(2**31)]])
    mine = raw_sum_codes(torch.from_numpy(values.astype(np.int32))).numpy()
    above, below = 32768 + mag(np.maximum(values, 0)), 32767 - mag(np.maximum(-values - 1, 0))
    golden = np.where(values >= 0, above, below)
    assert np.array_equal(mine, golden)
    assert not np.array_equal(mine ^ 1, golden)


def test_codes_keep_the_order_of_small_values():
    small = np.arange(-5000, 5000)
    raw = raw_sum_codes(torch.from_numpy(small.astype(np.int32))).numpy()
    assert (np.diff(raw) >= 0).all()
    assert (np.diff(raw[4000:6000]) == 1).all()


@pytest.mark.parametrize(
    "tokens", [*range(1, 7), 16, 17, 255, *range(256, 280), 288, 289, 600, 5000]
)
def test_offset_tokens(tokens):
    recent, probes = reference_positions(tokens)
    mine = offset_tokens(torch.arange(tokens).view(1, -1))[0].numpy()
    assert np.array_equal(mine, np.concatenate([recent, probes]))
    assert not np.array_equal(mine ^ 1, np.concatenate([recent, probes]))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("invalid_share", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("span", [1, 300, 5000, 2**24 - 2])
def test_offsets_equal_golden(rule, scope, invalid_share, span):
    spec = KernelSpec(16, 3, 2, rule=rule)
    generator = np.random.default_rng(span)
    for tokens in (1, 4, 15, 256, 258, 273, 277, 700):
        aligned = generator.integers(-span, span + 1, (spec.scored_heads, tokens))
        invalid = generator.random((tokens, 3)) < invalid_share
        golden = golden_offsets(aligned, invalid, spec, scope)
        mine = my_offsets(spec, scope, aligned, invalid)
        assert np.array_equal(mine, golden)
        assert not np.array_equal(mine ^ 1, golden)


def my_offsets(spec, scope, aligned, invalid):
    values = torch.from_numpy(aligned.astype(np.int32)).view(3, -1, aligned.shape[1])
    mask = torch.from_numpy(np.ascontiguousarray(invalid.T))
    if spec.rule is Rule.WEIGHT_SUM:
        sample = offset_tokens(values)
        return weight_sum_offsets(sample, offset_tokens(mask), aligned.shape[1]).numpy().reshape(-1)
    sums = values.sum(1, dtype=torch.int32)
    if scope is Scope.LAYER:
        sums, mask = sums.sum(0, keepdim=True, dtype=torch.int32), mask.any(0, keepdim=True)
    return raw_sum_offsets(offset_tokens(sums), offset_tokens(mask)).numpy()


def test_offset_of_one_lone_token_is_its_own_weight():
    """W is one weight of 1.0, so B is T: the lone token's Z is 0."""
    lone = weight_sum_offsets(
        torch.tensor([[[777]]], dtype=torch.int32), torch.tensor([[False]]), 1
    )
    assert lone.item() == 777
