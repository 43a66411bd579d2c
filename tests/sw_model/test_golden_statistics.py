# SPDX-License-Identifier: Apache-2.0
import golden_scalar as scalar
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_keys, same_statistics, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.statistics import segment_statistics

PRECEDING = statistics_of([[3, -2]], [[77, -5]])


def column(*values):
    """FP16 codes of shape (tokens, 1, 1)."""
    return np.array(values, dtype=np.float16).view(np.uint16).reshape(-1, 1, 1)


def codes_column(codes):
    return np.array(codes, dtype=np.uint16).reshape(-1, 1, 1)


def own(keys, segment_tokens=512):
    """Statistics of a second segment, padded with nothing: all tokens count."""
    return segment_statistics(keys, segment_tokens, segment_tokens, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 65_535), min_size=256, max_size=300))
def test_any_codes_equal_the_scalar_restatement(codes):
    found = own(codes_column(codes))
    c, mean = scalar.channel_statistics(codes)
    assert (found.exponents.item(), found.means.item()) == (c, mean)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 2),
    st.lists(st.integers(0, 2047), min_size=256, max_size=258),
)
def test_every_magnitude_equals_the_scalar_restatement(field, steps, fractions):
    # Codes that share (nearly) one exponent, so that c takes every value and ties occur.
    codes = [
        min(field + (f % (steps + 1)), 30) << 10 | (f & 1023) | (f >> 10) << 15 for f in fractions
    ]
    found = own(codes_column(codes))
    assert (found.exponents.item(), found.means.item()) == scalar.channel_statistics(codes)


def test_channels_do_not_touch_each_other():
    keys = random_keys(1, 300, 3, 5)
    found = own(keys)
    for g in range(3):
        for j in range(5):
            expected = scalar.channel_statistics([int(code) for code in keys[:, g, j]])
            assert (found.exponents[g, j], found.means[g, j]) == expected


def test_twin_a_flipped_key_bit_is_seen():
    keys = random_keys(1, 300, 3, 5)
    assert not same_statistics(own(keys), own(bit_flipped(keys, (7, 1, 2), 14)))
    means = own(keys).means
    assert not same_statistics(
        own(keys), ChannelStatistics(own(keys).exponents, bit_flipped(means, (2, 4), 0))
    )


def test_token_order_does_not_matter():
    keys = random_keys(2, 300, 1, 4)
    assert same_statistics(own(keys), own(keys[::-1]))


def test_types():
    found = own(random_keys(3, 300, 2, 16))
    assert (found.exponents.dtype, found.means.dtype) == (np.int8, np.int32)
    assert found.means.shape == (2, 16)


def test_exponent_limits():
    assert own(column(*[0.0] * 256)).exponents.item() == -14
    assert own(column(*[65504.0, -65504.0] * 128)).exponents.item() == 16
    # The largest |M|: a constant channel, whose mean must not meet the limit of 24 bits.
    for value in (65504.0, -65504.0, 1.0, 2.0**-24):
        found = own(column(*[value] * 256))
        assert found.means.item() * 2.0 ** (found.exponents.item() - 14) == value


def test_least_subnormals_shift_left():
    found = own(column(*[3 * 2.0**-24] * 256))
    # c = -14, M in units of 2^-28: sixteen to a least subnormal.
    assert (found.exponents.item(), found.means.item()) == (-14, 48)


def test_infinity_is_the_largest_number():
    assert same_statistics(
        own(column(*[np.inf] * 100, *[-np.inf] * 200)),
        own(column(*[65504.0] * 100, *[-65504.0] * 200)),
    )


def test_nan_counts_as_zero_and_is_counted():
    with_nan = own(column(*[np.nan] * 64, *[1.0] * 192))
    assert same_statistics(with_nan, own(column(*[0.0] * 64, *[1.0] * 192)))
    assert not same_statistics(with_nan, own(column(*[1.0] * 256)))


@pytest.mark.parametrize(("tokens", "is_default"), [(0, True), (35, True), (36, False)])
def test_first_segment_needs_32_tokens_beside_the_sinks(tokens, is_default):
    found = segment_statistics(random_keys(4, tokens, 2, 3), 0, 512, None)
    default = statistics_of(np.full((2, 3), 4), np.zeros((2, 3)))
    assert same_statistics(found, default) is is_default


def test_sinks_are_left_out():
    keys = random_keys(5, 100, 1, 4)
    changed = keys.copy()
    changed[:4] = 0x7BFF
    whole = segment_statistics(keys, 0, 512, None)
    assert same_statistics(whole, segment_statistics(changed, 0, 512, None))
    assert same_statistics(whole, segment_statistics(keys[4:], 4, 512, None))
    changed[4] = 0x7BFF
    assert not same_statistics(whole, segment_statistics(changed, 0, 512, None))


def test_a_whole_first_segment_is_its_own():
    keys = random_keys(6, 512, 1, 2)
    found = segment_statistics(keys, 0, 512, None)
    expected = [scalar.channel_statistics([int(code) for code in keys[4:, 0, j]]) for j in (0, 1)]
    assert list(zip(found.exponents[0], found.means[0], strict=True)) == expected


@pytest.mark.parametrize("segment_tokens", [512, 1024])
def test_half_a_segment_is_enough(segment_tokens):
    half = segment_tokens // 2
    keys = random_keys(7, half, 1, 2)
    few = segment_statistics(keys[:-1], segment_tokens, segment_tokens, PRECEDING)
    assert same_statistics(few, PRECEDING)
    enough = segment_statistics(keys, segment_tokens, segment_tokens, PRECEDING)
    assert not same_statistics(enough, PRECEDING)
    assert same_statistics(enough, own(keys, segment_tokens))


def test_no_tokens_of_a_later_segment():
    empty = np.zeros((0, 1, 2), dtype=np.uint16)
    assert same_statistics(segment_statistics(empty, 1024, 512, PRECEDING), PRECEDING)


def test_wrong_calls_are_refused():
    keys = random_keys(8, 40, 1, 2)
    with pytest.raises(ValueError, match="preceding"):
        segment_statistics(keys, 512, 512, None)
    with pytest.raises(ValueError, match="first segment"):
        segment_statistics(keys, 0, 512, PRECEDING)
    with pytest.raises(ValueError, match="one segment"):
        segment_statistics(keys, 500, 512, None)
    with pytest.raises(ValueError, match="one segment"):
        segment_statistics(keys, -1, 512, None)
    with pytest.raises(ValueError, match="shape"):
        segment_statistics(keys[0], 0, 512, None)
    with pytest.raises(TypeError, match="uint16"):
        segment_statistics(keys.view(np.float16), 0, 512, None)
