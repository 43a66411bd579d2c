# SPDX-License-Identifier: Apache-2.0
"""Channel statistics in C++ against the golden model, for every instruction set of this machine."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_variants import every_variant, native_scorer
from scorer_cases import (
    KEY_KINDS,
    any_statistics,
    assert_same_statistics,
    flip_bit,
    plain_keys,
)

from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.statistics import segment_statistics

SHAPES = [(1, 1), (1, 16), (3, 64), (2, 80), (3, 100), (1, 256), (40, 20)]


def scorer_of(variant, kv_heads, head_dim, segment_tokens=512):
    spec = KernelSpec(head_dim, kv_heads, 1, segment_tokens=segment_tokens)
    return native_scorer(variant, spec, Scope.LAYER)


def golden(keys, first_position, segment_tokens=512, preceding=None):
    codes = keys.detach().contiguous().numpy().view(np.uint16)
    return segment_statistics(codes, first_position, segment_tokens, preceding)


@every_variant
@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_equal_golden(kv_heads, head_dim, kind, variant):
    scorer = scorer_of(variant, kv_heads, head_dim)
    for first_position in (0, 512):
        keys = KEY_KINDS[kind](first_position + head_dim, 300, kv_heads, head_dim)
        mine = scorer.statistics(keys, first_position, None)
        assert mine.exponents.dtype == np.int8
        assert mine.means.dtype == np.int32
        assert_same_statistics(mine, golden(keys, first_position))


@every_variant
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", ["exponents", "means"])
def test_a_flipped_bit_is_noticed(part, seed, variant):
    keys = plain_keys(seed, 300, 2, 16)
    mine = scorer_of(variant, 2, 16).statistics(keys, 0, None)
    flip_bit(getattr(mine, part), seed)
    with pytest.raises(AssertionError):
        assert_same_statistics(mine, golden(keys, 0))


@every_variant
def test_every_key_counts(variant):
    """One key that grows by the smallest step that decides shows in the mean of its channel."""
    keys = torch.ones(512, 1, 64, dtype=torch.float16)
    scorer = scorer_of(variant, 1, 64)
    before = scorer.statistics(keys, 512, None)
    for token, channel in ((0, 0), (255, 31), (256, 32), (511, 63)):
        changed = keys.clone()
        changed[token, 0, channel] = 8.0
        mine = scorer.statistics(changed, 512, None)
        assert_same_statistics(mine, golden(changed, 512))
        assert list(np.flatnonzero(mine.means[0] != before.means[0])) == [channel]


@every_variant
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 35, 36, 37, 255, 256, 511, 512])
@pytest.mark.parametrize("first_position", [0, 2, 4, 512, 1024])
def test_thresholds_of_own_statistics(tokens, first_position, variant):
    tokens = min(tokens, 512 - first_position % 512)
    keys = KEY_KINDS["rare"](tokens + first_position, tokens, 2, 20)
    preceding = any_statistics(5, 2, 20) if first_position >= 512 else None
    mine = scorer_of(variant, 2, 20).statistics(keys, first_position, preceding)
    assert_same_statistics(mine, golden(keys, first_position, preceding=preceding))


@every_variant
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(codes=st.lists(st.integers(0, 65_535), min_size=1, max_size=90), first=st.integers(0, 6))
def test_any_channel(codes, first, variant):
    """One channel, so every drawn code counts; repeated to reach the thresholds."""
    keys = torch.from_numpy(np.resize(np.array(codes, np.uint16), (96, 1, 1)).view(np.float16))
    mine = scorer_of(variant, 1, 1).statistics(keys, first, None)
    assert_same_statistics(mine, golden(keys, first))


@every_variant
def test_every_fp16_code(variant):
    """Each code in a channel of its own, beside ones that keep the others in range."""
    scorer = scorer_of(variant, 64, 256)
    for part in range(4):
        codes = np.arange(part * 16_384, (part + 1) * 16_384, dtype=np.uint16)
        keys = np.broadcast_to(codes.reshape(1, 64, 256), (33, 64, 256)).copy()
        keys[1:20] = 0x3C01
        own = torch.from_numpy(keys.view(np.float16))
        assert_same_statistics(scorer.statistics(own, 4, None), golden(own, 4))


@every_variant
@pytest.mark.parametrize("value", [65504.0, -65504.0, float("inf")])
def test_largest_sums_do_not_round(value, variant):
    """65,536 tokens at the end of the range: sums of 2^56 that float64 alone would round."""
    keys = torch.full((65_536, 1, 1), value, dtype=torch.float16)
    keys[::3] = 2.0**-24
    mine = scorer_of(variant, 1, 1, 65_536).statistics(keys, 65_536, None)
    assert_same_statistics(mine, golden(keys, 65_536, 65_536))


@every_variant
def test_the_last_unit_of_a_large_sum_counts(variant):
    """Its 56 bits exceed float64's 53, and one unit decides between two means.

    Half of the tokens at the largest value, and a rest that puts ΣX one unit below where μ would
    round up to a value from which M rounds up as well.
    """
    keys = torch.zeros(65_536, 1, 1, dtype=torch.float16)
    keys[:32_768] = 65504.0
    keys[32_768:32_780] = 32768.0
    keys[32_780] = -(2.0**-9)
    scorer = scorer_of(variant, 1, 1, 65_536)
    means = []
    for last in (-(2.0**-24), 0.0):
        keys[-1] = last
        mine = scorer.statistics(keys, 65_536, None)
        assert_same_statistics(mine, golden(keys, 65_536, 65_536))
        means.append(mine.means.item())
    assert means[0] + 1 == means[1]


@every_variant
def test_keys_with_gaps_and_with_gradient(variant):
    """What a model hands over need be neither contiguous nor detached."""
    wide = plain_keys(19, 200, 4, 96)
    for own in (wide[:, ::2, 8:90:2], wide.transpose(0, 1).contiguous().transpose(0, 1)):
        scorer = scorer_of(variant, own.shape[1], own.shape[2])
        mine = scorer.statistics(own.detach().requires_grad_(), 0, None)
        assert_same_statistics(mine, golden(own, 0))


@every_variant
def test_threads_do_not_change_bits(variant):
    keys = KEY_KINDS["rare"](3, 512, 3, 100)
    scorer = scorer_of(variant, 3, 100)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_same_statistics(scorer.statistics(keys, 0, None), golden(keys, 0))
    finally:
        torch.set_num_threads(before)


@every_variant
def test_refuses_what_does_not_fit(variant):
    scorer = scorer_of(variant, 2, 16)
    keys = plain_keys(0, 10, 2, 16)
    with pytest.raises(ValueError, match="float16"):
        scorer.statistics(keys.float(), 0, None)
    with pytest.raises(ValueError, match="float16"):
        scorer.statistics(keys[:, :1], 0, None)
    with pytest.raises(ValueError, match="missing"):
        scorer.statistics(keys, 512, None)
    with pytest.raises(ValueError, match="first segment"):
        scorer.statistics(keys, 0, any_statistics(0, 2, 16))
    with pytest.raises(ValueError, match="one segment"):
        scorer.statistics(keys, 508, None)
