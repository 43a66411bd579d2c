# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from golden_inputs import bit_flipped, random_codes, same_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.layout import read_codes, write_codes

MODES = list(KeyMode)


def spec_of(mode, head_dim=64, kv_heads=2):
    return KernelSpec(head_dim, kv_heads, 1, key_mode=mode, segment_tokens=512)


def fresh(spec):
    return np.zeros((spec.segment_beats, 64), dtype=np.uint8)


def codes_of(spec, token_codes):
    """KeyCodes from {(token, kv_head, channel): code}, all other codes 0 and exponents 0."""
    tokens = 1 + max(token for token, _, _ in token_codes)
    codes = np.zeros((tokens, spec.kv_heads, spec.head_dim), dtype=np.int8)
    for place, code in token_codes.items():
        codes[place] = code
    return KeyCodes(codes, np.zeros(codes.shape[:2], dtype=np.uint8))


def set_bytes(shadow):
    """{(beat, byte): value} of everything that is not 0."""
    return {(int(beat), int(byte)): int(shadow[beat, byte]) for beat, byte in np.argwhere(shadow)}


# Written by hand from the contract, d = 64 (4 slices), kv = 2: two exponent beats, then tiles of
# 2 · 4 beats. INT8: 16 tiles of 4 tokens; INT4: 8 of 8; INT2: 4 of 16.
PLACES = [
    (KeyMode.INT8, (0, 0, 0), 5, (2, 0), 5),
    (KeyMode.INT8, (0, 0, 15), -1, (2, 15), 0xFF),
    (KeyMode.INT8, (0, 0, 16), -127, (3, 0), 0x81),
    (KeyMode.INT8, (1, 0, 0), 127, (2, 16), 127),
    (KeyMode.INT8, (0, 1, 0), 1, (6, 0), 1),
    (KeyMode.INT8, (3, 1, 63), 9, (9, 63), 9),
    (KeyMode.INT8, (4, 0, 0), 3, (10, 0), 3),
    (KeyMode.INT8, (63, 1, 63), 3, (129, 63), 3),
    (KeyMode.INT8, (64, 0, 0), 3, (132, 0), 3),
    (KeyMode.FP16, (64, 0, 0), 3, (132, 0), 3),
    (KeyMode.INT4, (0, 0, 0), 5, (2, 0), 0x05),
    (KeyMode.INT4, (0, 0, 1), 5, (2, 0), 0x50),
    (KeyMode.INT4, (0, 0, 1), -1, (2, 0), 0xF0),
    (KeyMode.INT4, (0, 0, 0), -7, (2, 0), 0x09),
    (KeyMode.INT4, (1, 0, 0), 1, (2, 8), 1),
    (KeyMode.INT4, (7, 1, 63), 7, (9, 63), 0x70),
    (KeyMode.INT4, (8, 0, 0), 1, (10, 0), 1),
    (KeyMode.INT4, (64, 0, 0), 1, (68, 0), 1),
    (KeyMode.INT2, (0, 0, 0), 1, (2, 0), 0b01),
    (KeyMode.INT2, (0, 0, 1), -2, (2, 0), 0b1000),
    (KeyMode.INT2, (0, 0, 3), -1, (2, 0), 0b11000000),
    (KeyMode.INT2, (0, 0, 4), 1, (2, 1), 1),
    (KeyMode.INT2, (1, 0, 0), 1, (2, 4), 1),
    (KeyMode.INT2, (15, 1, 63), 1, (9, 63), 0b01000000),
    (KeyMode.INT2, (16, 0, 0), 1, (10, 0), 1),
    (KeyMode.INT2, (64, 0, 0), 1, (36, 0), 1),
]


@pytest.mark.parametrize(("mode", "place", "code", "byte", "value"), PLACES)
def test_a_code_lies_at_its_known_byte(mode, place, code, byte, value):
    spec = spec_of(mode)
    shadow = fresh(spec)
    write_codes(shadow, 0, codes_of(spec, {place: code}), spec)
    assert set_bytes(shadow) == {byte: value}


@pytest.mark.parametrize(
    ("mode", "group_beats"),
    [(KeyMode.FP16, 130), (KeyMode.INT8, 130), (KeyMode.INT4, 66), (KeyMode.INT2, 34)],
)
def test_exponents_lie_before_the_tiles_of_their_group(mode, group_beats):
    spec = spec_of(mode)
    shadow = fresh(spec)
    codes = codes_of(spec, {(80, 0, 0): 0})
    exponents = codes.exponents.copy()
    exponents[0, 0], exponents[63, 1], exponents[64, 0], exponents[80, 1] = 11, 22, 33, 255
    write_codes(shadow, 0, KeyCodes(codes.codes, exponents), spec)
    assert set_bytes(shadow) == {
        (0, 0): 11,
        (1, 63): 22,
        (group_beats, 0): 33,
        (group_beats + 1, 16): 255,
    }


@pytest.mark.parametrize(("head_dim", "slices"), [(2, 4), (16, 4), (63, 4), (80, 5), (81, 6)])
def test_heads_are_padded_to_whole_slices_and_to_four(head_dim, slices):
    spec = spec_of(KeyMode.INT8, head_dim=head_dim)
    shadow = fresh(spec)
    write_codes(shadow, 0, codes_of(spec, {(0, 1, head_dim - 1): 7}), spec)
    channel = head_dim - 1
    assert set_bytes(shadow) == {(2 + slices + channel // 16, channel % 16): 7}
    assert shadow.shape[0] == 8 * 2 * (1 + 16 * slices)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads"), [(16, 1), (64, 3), (80, 2), (256, 5), (128, 8), (64, 40), (10, 1)]
)
def test_round_trip_of_a_whole_segment(mode, head_dim, kv_heads):
    spec = spec_of(mode, head_dim, kv_heads)
    codes = random_codes(1, 512, spec)
    shadow = fresh(spec)
    write_codes(shadow, 0, codes, spec)
    found = read_codes(shadow, 0, 512, spec)
    assert same_codes(found, codes)
    # Twin: any flipped bit of an exponent or of a tile's first (unpadded) lane shows.
    for beat in (0, spec.kv_heads):
        assert not same_codes(read_codes(bit_flipped(shadow, (beat, 0), 0), 0, 512, spec), codes)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 512), st.data())
def test_any_run_lies_where_the_whole_segment_puts_it(mode, first, data):
    spec = spec_of(mode, head_dim=80, kv_heads=3)
    tokens = data.draw(st.integers(0, 512 - first))
    codes = random_codes(2, 512, spec)
    whole, alone = fresh(spec), fresh(spec)
    write_codes(whole, 0, codes, spec)
    part = slice(first, first + tokens)
    write_codes(alone, first, KeyCodes(codes.codes[part], codes.exponents[part]), spec)
    found = read_codes(alone, first, tokens, spec)
    assert same_codes(found, KeyCodes(codes.codes[part], codes.exponents[part]))
    assert same_codes(found, read_codes(whole, first, tokens, spec))
    # Nothing lies outside the tokens written, and padding is 0.
    write_codes(
        alone,
        first,
        KeyCodes(np.zeros_like(codes.codes[part]), np.zeros_like(codes.exponents[part])),
        spec,
    )
    assert not alone.any()


@pytest.mark.parametrize("mode", MODES)
def test_runs_in_any_order_make_the_same_segment(mode):
    spec = spec_of(mode)
    codes = random_codes(3, 512, spec)
    once, parts = fresh(spec), fresh(spec)
    write_codes(once, 0, codes, spec)
    for start, end in ((300, 512), (0, 1), (65, 300), (1, 65)):
        part = slice(start, end)
        write_codes(parts, start, KeyCodes(codes.codes[part], codes.exponents[part]), spec)
    assert np.array_equal(once, parts)


@pytest.mark.parametrize("mode", MODES)
def test_written_again_a_token_takes_its_new_codes(mode):
    # After a rewind the same places take other tokens; nothing of the old may stay.
    spec = spec_of(mode)
    old, new = random_codes(4, 100, spec), random_codes(5, 100, spec)
    shadow, clean = fresh(spec), fresh(spec)
    write_codes(shadow, 30, old, spec)
    write_codes(shadow, 30, new, spec)
    write_codes(clean, 30, new, spec)
    assert np.array_equal(shadow, clean)


def test_a_view_into_a_larger_array_is_written_through():
    spec = spec_of(KeyMode.INT4)
    layers = np.zeros((spec.segment_beats, 3, 64), dtype=np.uint8)
    codes = random_codes(6, 512, spec)
    write_codes(layers[:, 1], 0, codes, spec)
    assert same_codes(read_codes(layers[:, 1], 0, 512, spec), codes)
    assert not layers[:, 0].any()
    assert not layers[:, 2].any()


def test_wrong_calls_are_refused():
    spec = spec_of(KeyMode.INT4)
    shadow, codes = fresh(spec), random_codes(7, 10, spec)
    with pytest.raises(ValueError, match="shadow"):
        write_codes(shadow[:-1], 0, codes, spec)
    with pytest.raises(ValueError, match="shadow"):
        read_codes(shadow.view(np.int8), 0, 10, spec)
    with pytest.raises(ValueError, match=r"tokens 503\.\.512"):
        write_codes(shadow, 503, codes, spec)
    with pytest.raises(ValueError, match="tokens -1"):
        read_codes(shadow, -1, 10, spec)
    with pytest.raises(ValueError, match="do not fit"):
        write_codes(shadow, 0, random_codes(7, 10, spec_of(KeyMode.INT4, head_dim=80)), spec)
    for mode, code in ((KeyMode.INT4, 8), (KeyMode.INT4, -9), (KeyMode.INT2, 2)):
        with pytest.raises(ValueError, match="bits"):
            write_codes(fresh(spec_of(mode)), 0, codes_of(spec, {(0, 0, 0): code}), spec_of(mode))
    assert not shadow.any()
