# SPDX-License-Identifier: Apache-2.0
"""Statistics, key codes and shadow of the torch scorer against the golden model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scorer_cases import (
    KEY_KINDS,
    any_statistics,
    assert_same_segments,
    assert_same_statistics,
    flip_bit,
    plain_keys,
    segments_of,
)
from twins.key_path import code_keys, take_statistics
from twins.torch_scorer import TorchScorer

from hillinfer.devices.opening import GoldenScorer
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import encode_keys
from hillinfer_model.layout import read_codes
from hillinfer_model.statistics import segment_statistics

SHAPES = [(1, 16), (3, 64), (2, 80), (1, 256), (3, 100), (40, 64), (1, 1)]
EVERY_CODE = torch.from_numpy(np.arange(65_536, dtype=np.uint16).view(np.float16).reshape(-1, 1, 1))


def codes_of(keys):
    return keys.numpy().view(np.uint16)


def both(spec):
    return TorchScorer(spec, Scope.LAYER), GoldenScorer(spec, Scope.LAYER)


def assert_same_codes(keys, statistics, key_mode):
    assert_codes_are_golden(
        code_keys(keys, statistics, key_mode.code_bits), keys, statistics, key_mode
    )


def assert_codes_are_golden(mine, keys, statistics, key_mode):
    codes, exponents = mine
    golden = encode_keys(codes_of(keys), statistics, key_mode)
    assert codes.dtype == torch.int8
    assert exponents.dtype == torch.uint8
    assert np.array_equal(codes.numpy(), golden.codes)
    assert np.array_equal(exponents.numpy(), golden.exponents)


@pytest.mark.parametrize("key_mode", KeyMode)
@pytest.mark.parametrize("exponent", [-14, -1, 4, 11, 16])
def test_every_fp16_code_alone(key_mode, exponent):
    for mean in (0, 1, -12345, 2**23 - 1, 1 - 2**23):
        statistics = ChannelStatistics(
            np.full((1, 1), exponent, np.int8), np.full((1, 1), mean, np.int32)
        )
        assert_same_codes(EVERY_CODE, statistics, key_mode)


@pytest.mark.parametrize("key_mode", KeyMode)
def test_every_fp16_code_beside_others(key_mode):
    # Nine channels of unlike statistics share one token exponent.
    rolled = torch.stack([EVERY_CODE[:, 0, 0].roll(shift) for shift in range(0, 9 * 7001, 7001)], 1)
    assert_same_codes(rolled.unsqueeze(1), any_statistics(1, 1, 9), key_mode)
    finite = torch.where(rolled.isnan(), torch.zeros_like(rolled), rolled)
    assert_same_codes(finite.unsqueeze(1), any_statistics(2, 1, 9), key_mode)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", [0, 1])
def test_a_flipped_bit_of_a_code_or_exponent_is_noticed(seed, part):
    statistics = any_statistics(3, 1, 1)
    mine = code_keys(EVERY_CODE, statistics, 4)
    flip_bit(mine[part].numpy(), seed)
    with pytest.raises(AssertionError):
        assert_codes_are_golden(mine, EVERY_CODE, statistics, KeyMode.INT4)


@pytest.mark.parametrize("key_mode", KeyMode)
@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_segments_equal_golden(key_mode, kind, kv_heads, head_dim):
    spec = KernelSpec(head_dim, kv_heads, 1, key_mode, segment_tokens=512)
    torch_scorer, golden = both(spec)
    keys = KEY_KINDS[kind](7, 600 if kv_heads < 40 else 90, kv_heads, head_dim)
    assert_same_segments(segments_of(torch_scorer, keys), segments_of(golden, keys))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("part", ["shadow", "means", "exponents"])
def test_a_flipped_bit_is_noticed(seed, part):
    torch_scorer, golden = both(KernelSpec(16, 2, 1, segment_tokens=512))
    keys = plain_keys(3, 70, 2, 16)
    mine = segments_of(torch_scorer, keys)
    where = {
        "shadow": mine[0].shadow,
        "means": mine[0].statistics.means,
        "exponents": mine[0].statistics.exponents,
    }
    flip_bit(where[part], seed)
    with pytest.raises(AssertionError):
        assert_same_segments(mine, segments_of(golden, keys))


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 35, 36, 37, 255, 256, 511, 512])
@pytest.mark.parametrize("first_position", [0, 2, 4, 512, 1024])
def test_thresholds_of_own_statistics(tokens, first_position):
    spec = KernelSpec(20, 2, 1, segment_tokens=512)
    tokens = min(tokens, 512 - first_position % 512)
    keys = KEY_KINDS["rare"](tokens + first_position, tokens, 2, 20)
    preceding = any_statistics(5, 2, 20) if first_position >= 512 else None
    mine = TorchScorer(spec, Scope.LAYER).statistics(keys, first_position, preceding)
    golden = segment_statistics(codes_of(keys), first_position, 512, preceding)
    assert_same_statistics(mine, golden)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 65_535), min_size=1, max_size=90),
    st.integers(0, 6),
    st.sampled_from(KeyMode),
)
def test_any_channel(codes, first_position, key_mode):
    """One channel, so every drawn code counts; repeated to reach the thresholds."""
    keys = np.resize(np.array(codes, dtype=np.uint16), 96).reshape(-1, 1, 1)
    own = torch.from_numpy(keys.view(np.float16))
    spec = KernelSpec(1, 1, 1, key_mode, segment_tokens=512)
    mine = TorchScorer(spec, Scope.LAYER).statistics(own, first_position, None)
    assert_same_statistics(mine, segment_statistics(keys, first_position, 512, None))
    assert_same_codes(own, mine, key_mode)


@pytest.mark.parametrize("value", [65504.0, -65504.0, float("inf")])
def test_largest_sums_do_not_round(value):
    """65,536 tokens at the end of the range: sums of 2^56 that float64 alone would round."""
    spec = KernelSpec(1, 1, 1, segment_tokens=65_536)
    keys = torch.full((65_536, 1, 1), value, dtype=torch.float16)
    keys[::3] = 2.0**-24
    mine = TorchScorer(spec, Scope.LAYER).statistics(keys, 65_536, None)
    assert_same_statistics(mine, segment_statistics(codes_of(keys), 65_536, 65_536, None))


def test_the_last_unit_of_a_large_sum_counts():
    """Its 56 bits exceed float64's 53; one unit decides between two means.

    Half of the tokens at the largest value, and a rest that puts ΣX one unit below where μ would
    round up to a value from which M rounds up as well.
    """
    keys = torch.zeros(65_536, 1, 1, dtype=torch.float16)
    keys[:32_768] = 65504.0
    keys[32_768:32_780] = 32768.0
    keys[32_780] = -(2.0**-9)
    spec = KernelSpec(1, 1, 1, segment_tokens=65_536)
    means = []
    for last in (-(2.0**-24), 0.0):
        keys[-1] = last
        mine = take_statistics(spec, keys, 65_536, None, 65_536)
        assert_same_statistics(mine, segment_statistics(codes_of(keys), 65_536, 65_536, None))
        means.append(mine.means.item())
    assert means[0] + 1 == means[1]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 100_000])
def test_chunks_do_not_change_statistics(chunk_tokens):
    spec = KernelSpec(16, 2, 1)
    keys = KEY_KINDS["rare"](11, 300, 2, 16)
    golden = segment_statistics(codes_of(keys), 0, 1024, None)
    assert_same_statistics(take_statistics(spec, keys, 0, None, chunk_tokens), golden)


@pytest.mark.parametrize("key_mode", KeyMode)
def test_growing_token_by_token(key_mode):
    spec = KernelSpec(80, 3, 1, key_mode, segment_tokens=512)
    torch_scorer, golden = both(spec)
    keys = KEY_KINDS["rare"](13, 140, 3, 80)
    whole = segments_of(golden, keys)[0]
    shadow = np.zeros_like(whole.shadow)
    first = 0
    for tokens in [*[1] * 70, 33, 2, 25, 10]:
        torch_scorer.encode(keys[first : first + tokens], whole.statistics, shadow, first)
        first += tokens
    assert first == keys.shape[0]
    assert np.array_equal(shadow, whole.shadow)
    read = read_codes(shadow, 0, first, spec)
    golden_codes = encode_keys(codes_of(keys), whole.statistics, key_mode)
    assert np.array_equal(read.codes, golden_codes.codes)
    assert np.array_equal(read.exponents, golden_codes.exponents)


@pytest.mark.parametrize("key_mode", KeyMode)
def test_encoding_leaves_other_tokens_alone(key_mode):
    spec = KernelSpec(64, 2, 1, key_mode, segment_tokens=512)
    torch_scorer, golden = both(spec)
    before = np.random.default_rng(0).integers(0, 256, (spec.segment_beats, 64), dtype=np.uint8)
    mine, theirs = before.copy(), before.copy()
    keys = plain_keys(17, 50, 2, 64)
    statistics = any_statistics(3, 2, 64)
    torch_scorer.encode(keys, statistics, mine, 37)
    golden.encode(keys, statistics, theirs, 37)
    assert np.array_equal(mine, theirs)
    assert not np.array_equal(mine, before)


def test_keys_of_a_slice_and_with_gradient():
    """What a model hands over need be neither contiguous nor detached."""
    torch_scorer, golden = both(KernelSpec(16, 2, 1, segment_tokens=512))
    keys = plain_keys(19, 64, 4, 32)[:, ::2, 8:24].requires_grad_()
    plain = keys.detach().contiguous()
    assert_same_segments(segments_of(torch_scorer, keys), segments_of(golden, plain))


def test_refuses_what_does_not_fit():
    scorer = TorchScorer(KernelSpec(16, 2, 1, segment_tokens=512), Scope.LAYER)
    keys = plain_keys(0, 10, 2, 16)
    statistics = any_statistics(0, 2, 16)
    shadow = np.zeros((scorer.spec.segment_beats, 64), dtype=np.uint8)
    with pytest.raises(ValueError, match="float16"):
        scorer.statistics(keys.float(), 0, None)
    with pytest.raises(ValueError, match="float16"):
        scorer.encode(keys[:, :1], statistics, shadow, 0)
    with pytest.raises(ValueError, match="missing"):
        scorer.statistics(keys, 512, None)
    with pytest.raises(ValueError, match="first segment"):
        scorer.statistics(keys, 0, statistics)
    with pytest.raises(ValueError, match="one segment"):
        scorer.statistics(keys, 1020, statistics)
    with pytest.raises(ValueError, match="outside"):
        scorer.encode(keys, statistics, shadow, 503)
    with pytest.raises(ValueError, match="statistics"):
        scorer.encode(keys, any_statistics(0, 1, 16), shadow, 0)
    for wrong in (shadow[:-1], shadow.astype(np.int8), np.asfortranarray(shadow)):
        with pytest.raises(ValueError, match="shadow"):
            scorer.encode(keys, statistics, wrong, 0)
    assert not shadow.any()
