# SPDX-License-Identifier: Apache-2.0
"""Value codes and their layout against the oracle, at every boundary of the contract page."""

from fractions import Fraction

import numpy as np
import oracle_values
import pytest
from golden_inputs import random_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, halves, same
from oracle_numbers import fp16_value

from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.selection import exact_count
from hillinfer_model.value_codes import (
    INVALID_SCALE,
    ValueCodes,
    decode_values,
    encode_values,
    value_means,
)
from hillinfer_model.value_layout import read_values, value_segment_beats, write_values

INF, NAN, LARGEST = 0x7C00, 0x7E00, 0x7BFF
EDGE_CODES = np.array(
    [s | e << 10 | f for s in (0, 0x8000) for e in range(31) for f in (0, 1, 511, 512, 1023)]
    + [INF, 0xFC00],
    dtype=np.uint16,
)


def table_of(means):
    return {(int(g), int(j)): int(code) for (g, j), code in np.ndenumerate(means)}


def column(values):
    """Return one KV head and channel of a first segment from FP16 codes, behind loud sinks."""
    codes = np.concatenate([np.full(4, LARGEST), values]).astype(np.uint16)
    return codes[:, np.newaxis, np.newaxis]


# Means


def means_alike(values, first, segment, preceding, golden_values=None):
    given_values = values if golden_values is None else golden_values
    found = value_means(given_values, first, segment, preceding)
    before = None if preceding is None else table_of(preceding)
    expected = oracle_values.means(values.tolist(), first, segment, before)
    return same(
        found,
        np.uint16,
        [[expected[g, j] for j in range(found.shape[1])] for g in range(found.shape[0])],
    )


@pytest.mark.parametrize("tokens", [1, 4, 35, 36, 37, 512])
def test_means_of_a_first_segment(tokens):
    values = random_keys(tokens, tokens, 2, 5)
    assert means_alike(values, 0, 1024, None)
    assert bool(value_means(values, 0, 1024, None).any()) == (tokens >= 36)


@pytest.mark.parametrize("tokens", [1, 511, 512, 1024])
def test_means_of_a_later_segment(tokens):
    values = random_keys(tokens, tokens, 1, 3)
    before = halves([[1.0, -2.0, 0.5]])
    assert means_alike(values, 2048, 1024, before)
    assert np.array_equal(value_means(values, 2048, 1024, before), before) == (tokens < 512)


@pytest.mark.parametrize("value", [*EDGE_CODES[::7].tolist(), INF, 0xFC00, LARGEST, 0xFBFF])
def test_mean_of_one_value_and_of_it_with_a_neighbour(value):
    neighbour = value - 1 if value & 1023 else value
    for values in ([value] * 32, [value, neighbour] * 16, [value] * 31 + [NAN]):
        assert means_alike(column(values), 0, 1024, None)
    changed = flipped(column([value] * 32), 5, 9)
    assert value == 0 or not means_alike(column([value] * 32), 0, 1024, None, changed)


def test_means_leave_the_sinks_out_and_count_nan_as_zero():
    values = column([0x3C00] * 31 + [NAN])
    assert value_means(values, 0, 1024, None) == halves([31 / 32])
    values[4:] = 0x3C00
    assert value_means(values, 0, 1024, None) == halves([1.0])


def test_means_refuse_what_statistics_refuse():
    with pytest.raises(ValueError, match="do not lie in one segment"):
        value_means(np.zeros((1025, 1, 1), np.uint16), 0, 1024, None)
    with pytest.raises(ValueError, match="too few"):
        value_means(np.zeros((5, 1, 1), np.uint16), 1024, 1024, None)
    with pytest.raises(TypeError, match="FP16 codes are uint16"):
        value_means(np.zeros((40, 1, 1), np.float16), 0, 1024, None)


# Codes


def codes_alike(values, means, golden_values=None):
    found = encode_values(values if golden_values is None else golden_values, means)
    expected = [oracle_values.encode(token, table_of(means)) for token in values.tolist()]
    return same(found.scales, np.uint8, [b for b, _ in expected]) and same(
        found.codes, np.int8, [codes for _, codes in expected]
    )


def test_codes_of_edge_values_around_edge_means():
    for mean in (0, 1, 0x3C00, 0xBC01, LARGEST, 0xFBFF):
        means = np.array([[mean, 0]], dtype=np.uint16)
        for other in (0, 0x3C00, LARGEST):
            values = np.stack([EDGE_CODES, np.full_like(EDGE_CODES, other)], axis=1)
            assert codes_alike(values[:, np.newaxis], means)


def largest_at(byte):
    """Return the largest distance that a scale reaches, as FP16 codes around it."""
    code = int(halves([float(Fraction(15, 2) * oracle_values.scale(byte))])[0])
    return [code - 1, code, code + 1]


@pytest.mark.parametrize("byte", [0, 1, 7, 8, 9, 113, 136, 200, 239, 240])
def test_scale_steps_where_its_reach_ends(byte):
    rows = [[[code, 0x0001]] for code in largest_at(byte)]
    values = np.array(rows, dtype=np.uint16)
    means = np.zeros((1, 2), dtype=np.uint16)
    assert codes_alike(values, means)
    found = encode_values(values, means).scales[:, 0].tolist()
    assert found[0] <= byte < found[2]


def test_a_distance_beyond_the_largest_scale_is_limited():
    values, means = halves([[[65504.0, -65504.0]]]), halves([[-65504.0, 65504.0]])
    assert codes_alike(values, means)
    found = encode_values(values, means)
    assert (found.scales.item(), found.codes.tolist()) == (247, [[[7, -7]]])


def test_ties_go_to_the_even_code():
    # Scale 8·2^(17-20) = 1 reaches 7.5: halves of it are ties.
    values = halves([[[7.5, 0.5, 1.5, 2.5, -0.5, -3.5, 6.5]]])
    found = encode_values(values, np.zeros((1, 7), dtype=np.uint16))
    assert found.codes.tolist() == [[[7, 0, 2, 2, 0, -4, 6]]]
    assert codes_alike(values, np.zeros((1, 7), dtype=np.uint16))


def test_a_nan_makes_its_token_invalid_in_its_head_only():
    values = random_keys(3, 6, 2, 4)
    values[2, 1, 3] = NAN
    values[4, 0, 0] = 0xFE01
    means = halves(np.zeros((2, 4)))
    assert codes_alike(values, means)
    found = encode_values(values, means)
    assert found.invalid.nonzero()[0].tolist() == [2, 4]
    assert not found.codes[2, 1].any()
    assert found.codes[2, 0].any()
    assert np.isnan(decode_values(found, means)[2, 1]).all()


@pytest.mark.parametrize("bit", [8, 10, 15])
def test_a_flipped_bit_of_a_value_is_noticed(bit):
    values, means = random_keys(5, 4, 1, 8), halves(np.zeros((1, 8)))
    largest = int(np.abs(values.view(np.float16)[0, 0]).argmax())
    assert codes_alike(values, means)
    assert not codes_alike(values, means, flipped(values, largest, bit))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_codes_of_any_values(data):
    kv, d = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    finite = st.integers(0, LARGEST) | st.integers(0x8000, 0xFBFF)
    means = data.draw(st.lists(finite, min_size=kv * d, max_size=kv * d))
    codes = data.draw(st.lists(st.integers(0, 65535), min_size=3 * kv * d, max_size=3 * kv * d))
    assert codes_alike(
        np.array(codes, dtype=np.uint16).reshape(3, kv, d),
        np.array(means, dtype=np.uint16).reshape(kv, d),
    )


def test_decoded_values_are_means_and_codes_times_scales():
    values, means = random_keys(7, 9, 2, 6), halves(np.arange(12).reshape(2, 6) / 7)
    found = encode_values(values, means)
    decoded = decode_values(found, means)
    for (i, g, j), code in np.ndenumerate(found.codes):
        step = oracle_values.scale(int(found.scales[i, g]))
        assert Fraction(decoded[i, g, j]) == fp16_value(int(means[g, j])) + int(code) * step
        assert abs(decoded[i, g, j] - float(values.view(np.float16)[i, g, j])) <= step / 2


def test_value_codes_refuse_other_arrays():
    with pytest.raises(ValueError, match="int8 and uint8"):
        ValueCodes(np.zeros((1, 1, 1), np.int16), np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match="need shapes"):
        ValueCodes(np.zeros((2, 1, 1), np.int8), np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match="do not fit means"):
        encode_values(np.zeros((1, 2, 3), np.uint16), np.zeros((1, 3), np.uint16))


# Layout


def some_codes(seed, tokens, kv, d):
    generator = np.random.default_rng(seed)
    return ValueCodes(
        generator.integers(-7, 8, (tokens, kv, d), dtype=np.int8),
        generator.integers(0, 256, (tokens, kv), dtype=np.uint8),
    )


def nested(codes):
    return list(zip(codes.scales.tolist(), codes.codes.tolist(), strict=True))


@pytest.mark.parametrize(("kv", "d"), [(1, 1), (1, 64), (2, 80), (3, 64), (1, 100), (2, 256)])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (0, 64), (63, 2), (40, 100), (511, 1)])
def test_layout_is_the_oracles(kv, d, first, tokens):
    spec = KernelSpec(d, kv, 1, segment_tokens=512)
    codes = some_codes(d + first, tokens, kv, d)
    shadow = np.zeros((value_segment_beats(spec), 64), dtype=np.uint8)
    write_values(shadow, first, codes, spec)
    expected = oracle_values.shadow(nested(codes), kv, d, 512, first)
    assert shadow.tobytes() == expected
    assert flipped(shadow, 64 * kv + 1).tobytes() != expected
    back = read_values(shadow, first, tokens, spec)
    assert np.array_equal(back.codes, codes.codes)
    assert np.array_equal(back.scales, codes.scales)


def test_tokens_written_apart_lie_as_if_written_together():
    spec = KernelSpec(64, 2, 2, segment_tokens=512)
    codes = some_codes(1, 150, 2, 64)
    whole, parts = (np.zeros((value_segment_beats(spec), 64), np.uint8) for _ in range(2))
    write_values(whole, 0, codes, spec)
    for first, stop in ((100, 150), (0, 63), (63, 100)):
        part = ValueCodes(codes.codes[first:stop], codes.scales[first:stop])
        write_values(parts, first, part, spec)
    assert np.array_equal(whole, parts)


def test_layout_refuses_what_does_not_fit():
    spec = KernelSpec(64, 1, 1, segment_tokens=512)
    shadow = np.zeros((value_segment_beats(spec), 64), dtype=np.uint8)
    with pytest.raises(ValueError, match="do not lie in a segment"):
        write_values(shadow, 510, some_codes(1, 3, 1, 64), spec)
    with pytest.raises(ValueError, match="do not fit the spec"):
        write_values(shadow, 0, some_codes(1, 3, 2, 64), spec)
    with pytest.raises(ValueError, match=r"outside -7\.\.7"):
        write_values(
            shadow, 0, ValueCodes(np.full((1, 1, 64), 8, np.int8), np.zeros((1, 1), np.uint8)), spec
        )
    with pytest.raises(ValueError, match="a value shadow of"):
        read_values(shadow[1:], 0, 1, spec)


def test_a_value_shadow_of_64_channels_is_as_large_as_an_int4_key_shadow():
    spec = KernelSpec(64, 3, 3)
    assert value_segment_beats(spec) == spec.segment_beats
    assert INVALID_SCALE == 255


# The split


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_exact_count_is_the_oracles(data):
    length = data.draw(st.integers(1, 200_000))
    selected = data.draw(st.integers(0, length))
    given_ = (
        data.draw(st.floats(0, 1)),
        data.draw(st.integers(0, 200)),
        data.draw(st.integers(0, 40)),
        selected,
    )
    assert exact_count(length, *given_) == oracle_values.exact_count(length, *given_)


def test_exact_count_of_one_is_all_and_a_bad_share_is_refused():
    assert exact_count(4096, 1.0, 0, 36, 410) == 410
    assert exact_count(4096, 0.02, 0, 36, 410) == 82
    with pytest.raises(ValueError, match=r"share=1\.5"):
        exact_count(10, 1.5, 0, 0, 5)
