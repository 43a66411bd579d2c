# SPDX-License-Identifier: Apache-2.0
import golden_scalar as scalar
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_keys, same_codes, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.choices import KeyMode
from hillinfer_model.key_codes import KeyCodes, encode_keys

MODES = list(KeyMode)
LIMIT = 2**23 - 1
ALL_CODES = np.arange(65_536, dtype=np.uint16)


@pytest.mark.parametrize(
    ("c", "mean", "mode"),
    # A number is centred before it is coded, in the same way whatever the mode.
    [
        *((4, 0, mode) for mode in (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)),
        (-14, -LIMIT, KeyMode.INT8),
        (16, 3, KeyMode.INT4),
        (-3, 1_234_567, KeyMode.INT2),
    ],
)
def test_every_fp16_code_equals_the_scalar_restatement(c, mean, mode):
    # One channel: every token has its own exponent.
    found = encode_keys(ALL_CODES.reshape(-1, 1, 1), statistics_of([[c]], [[mean]]), mode)
    expected = [scalar.key([code], [c], [mean], mode.value) for code in range(65_536)]
    assert found.exponents[:, 0].tolist() == [t for t, _ in expected]
    assert found.codes[:, 0, 0].tolist() == [codes[0] for _, codes in expected]


@pytest.mark.parametrize("mode", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
def test_every_fp16_code_beside_a_large_channel(mode):
    # The second channel fixes t, so that small codes meet every rounding of the first.
    keys = np.stack([ALL_CODES, np.full_like(ALL_CODES, 0x5000)], axis=1).reshape(-1, 1, 2)
    found = encode_keys(keys, statistics_of([[2, 4]], [[-7, 0]]), mode)
    expected = [scalar.key([c, 0x5000], [2, 4], [-7, 0], mode.value) for c in range(65_536)]
    assert found.exponents[:, 0].tolist() == [t for t, _ in expected]
    assert found.codes[:, 0].tolist() == [codes for _, codes in expected]
    assert not same_codes(found, KeyCodes(bit_flipped(found.codes, (9, 0, 1), 0), found.exponents))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(MODES))
def test_any_keys_equal_the_scalar_restatement(data, mode):
    channels = data.draw(st.integers(1, 6))
    draw = [
        data.draw(st.lists(each, min_size=channels, max_size=channels))
        for each in (st.integers(0, 65_535), st.integers(-14, 16), st.integers(-LIMIT, LIMIT))
    ]
    codes, cs, means = draw
    found = encode_keys(
        np.array(codes, dtype=np.uint16).reshape(1, 1, -1), statistics_of(cs, means), mode
    )
    t, expected = scalar.key(codes, cs, means, mode.value)
    assert (found.exponents.item(), found.codes[0, 0].tolist()) == (t, expected)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_heads_do_not_touch_each_other(mode):
    keys = random_keys(1, 20, 3, 8)
    generator = np.random.default_rng(2)
    statistics = statistics_of(
        generator.integers(-3, 6, (3, 8)), generator.integers(-9999, 9999, (3, 8))
    )
    whole = encode_keys(keys, statistics, mode)
    for token in range(20):
        for head in range(3):
            alone = encode_keys(
                keys[token : token + 1, head : head + 1],
                statistics_of(statistics.exponents[head], statistics.means[head]),
                mode,
            )
            assert np.array_equal(alone.codes[0, 0], whole.codes[token, head])
            assert alone.exponents.item() == whole.exponents[token, head]


def test_fp16_mode_makes_the_codes_of_int8():
    keys, statistics = random_keys(3, 50, 2, 16), statistics_of(*np.full((2, 2, 16), 4))
    assert same_codes(
        encode_keys(keys, statistics, KeyMode.FP16), encode_keys(keys, statistics, KeyMode.INT8)
    )
    assert not same_codes(
        encode_keys(keys, statistics, KeyMode.FP16), encode_keys(keys, statistics, KeyMode.INT4)
    )


def one(distances, mode):
    """Codes of a token with these distances from the mean (keys are 0, so D = -M)."""
    keys = np.zeros((1, 1, len(distances)), dtype=np.uint16)
    means = [-distance for distance in distances]
    found = encode_keys(keys, statistics_of([4] * len(distances), means), mode)
    return found.exponents.item(), found.codes[0, 0].tolist()


def test_int8_rounds_half_to_even_and_saturates():
    assert one([127, 1], KeyMode.INT8) == (0, [127, 1])
    assert one([128, 1, 3, 5, -1, -3], KeyMode.INT8) == (1, [64, 0, 2, 2, 0, -2])
    # 255 · 2^-1 = 127.5 rounds to 128 and is limited.
    assert one([255, -255], KeyMode.INT8) == (1, [127, -127])
    assert one([LIMIT, -LIMIT], KeyMode.INT8) == (16, [127, -127])


def test_int4_rounds_half_to_even_and_saturates():
    assert one([7, -7], KeyMode.INT4) == (0, [7, -7])
    assert one([8, 1, 3, 5], KeyMode.INT4) == (1, [4, 0, 2, 2])
    assert one([15, -15], KeyMode.INT4) == (1, [7, -7])


def test_int2_floors_and_saturates():
    # t = 1: κ = D >> 2, -8..7 would be -2..1 already, so the largest saturate.
    assert one([15, 8, 7, 4, 3, 0, -1, -4, -5, -8, -9, -15], KeyMode.INT2) == (
        1,
        [1, 1, 1, 1, 0, 0, -1, -1, -2, -2, -2, -2],
    )


def test_zero_keys_have_exponent_zero():
    for mode in MODES:
        assert one([0, 0], mode) == (0, [0, 0])


def test_centring_truncates_toward_zero():
    # 3 · 2^-11 with c = 4 is 1.5 units of 2^-10.
    keys = np.array([3 * 2.0**-11, -3 * 2.0**-11], dtype=np.float16).view(np.uint16)
    found = encode_keys(keys.reshape(1, 1, 2), statistics_of([4, 4], [0, 0]), KeyMode.INT8)
    assert found.codes[0, 0].tolist() == [1, -1]


def test_infinity_is_the_largest_number():
    statistics = statistics_of([16], [0])
    infinite = np.array([0x7C00, 0xFC00], dtype=np.uint16).reshape(2, 1, 1)
    largest = np.array([0x7BFF, 0xFBFF], dtype=np.uint16).reshape(2, 1, 1)
    for mode in MODES:
        assert same_codes(
            encode_keys(infinite, statistics, mode), encode_keys(largest, statistics, mode)
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", [0x7E00, 0xFE00, 0x7C01, 0xFFFF])
def test_a_nan_makes_its_token_invalid_in_its_head_alone(mode, code):
    keys = random_keys(4, 6, 3, 8)
    keys[2, 1, 5] = code
    statistics = statistics_of(np.full((3, 8), 4), np.full((3, 8), 9))
    found = encode_keys(keys, statistics, mode)
    marks = np.zeros((6, 3), dtype=np.bool_)
    marks[2, 1] = True
    assert np.array_equal(found.invalid, marks)
    assert found.exponents[2, 1] == 255
    assert not found.codes[2, 1].any()
    keys[2, 1, 5] = 0
    healthy = encode_keys(keys, statistics, mode)
    others = ~marks
    assert np.array_equal(found.codes[others], healthy.codes[others])


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode):
    found = encode_keys(
        np.zeros((0, 2, 4), dtype=np.uint16), statistics_of(*np.zeros((2, 2, 4))), mode
    )
    assert found.codes.shape == (0, 2, 4)
    assert found.exponents.shape == (0, 2)
    assert (found.codes.dtype, found.exponents.dtype) == (np.int8, np.uint8)


def test_wrong_calls_are_refused():
    statistics = statistics_of([4, 4], [0, 0])
    with pytest.raises(ValueError, match="do not fit"):
        encode_keys(np.zeros((3, 1, 3), dtype=np.uint16), statistics, KeyMode.INT8)
    with pytest.raises(TypeError, match="uint16"):
        encode_keys(np.zeros((3, 1, 2), dtype=np.float16), statistics, KeyMode.INT8)
    with pytest.raises(ValueError, match="int8 and uint8"):
        KeyCodes(np.zeros((3, 1, 2), dtype=np.int16), np.zeros((3, 1), dtype=np.uint8))
    with pytest.raises(ValueError, match="shapes"):
        KeyCodes(np.zeros((3, 1, 2), dtype=np.int8), np.zeros((3, 2), dtype=np.uint8))
