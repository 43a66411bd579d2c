# SPDX-License-Identifier: Apache-2.0
"""Value codes and their layout against the oracle, and how many tokens are exact."""

from fractions import Fraction

import numpy as np
import oracle_keys
import oracle_values
import pytest
from golden_inputs import random_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_arrays import flipped, from_statistics, same

from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.selection import exact_count
from hillinfer_model.value_codes import decode_values, encode_values, value_statistics
from hillinfer_model.value_layout import read_values, value_segment_beats, write_values

NAN = 0x7E00


# Codes


def codes_alike(values, preceding, first, golden_values=None):
    found_values = values if golden_values is None else golden_values
    statistics = value_statistics(found_values, first, 1024, preceding)
    found = encode_values(found_values, statistics)
    before = None if preceding is None else from_statistics(preceding)
    table = oracle_keys.statistics(values.tolist(), first, 1024, before)
    expected = [oracle_keys.encode(token, table, "int4") for token in values.tolist()]
    return (
        from_statistics(statistics) == table
        and same(found.exponents, np.uint8, [t for t, _ in expected])
        and same(found.codes, np.int8, [codes for _, codes in expected])
    )


def test_values_are_coded_as_int4_keys():
    values = random_keys(1, 120, 2, 5)
    values[50, 1, 3] = NAN
    assert codes_alike(values, None, 0)
    assert not codes_alike(values, None, 0, flipped(values, 700, 13))
    before = value_statistics(values, 0, 1024, None)
    assert codes_alike(values, before, 1024)
    assert not codes_alike(random_keys(2, 600, 2, 5), before, 1024, random_keys(3, 600, 2, 5))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=72, max_size=72))
def test_codes_of_any_values(codes):
    assert codes_alike(np.array(codes, dtype=np.uint16).reshape(36, 1, 2), None, 0)


def test_decoded_values_are_near_and_exactly_what_the_page_says():
    values = random_keys(7, 90, 2, 6)
    values[60, 1, 3] = NAN
    statistics = value_statistics(values, 0, 1024, None)
    found, table = encode_values(values, statistics), from_statistics(statistics)
    decoded = decode_values(found, statistics)
    assert np.isnan(decoded[60, 1]).all()
    assert np.isnan(decoded).sum() == 6
    for (i, g, j), code in np.ndenumerate(found.codes):
        if (i, g) == (60, 1):
            continue
        t, (c, mean) = int(found.exponents[i, g]), table[g, j]
        assert Fraction(decoded[i, g, j]) == oracle_values.decoded(int(code), t, c, mean)
        # A step at most, where the largest code is limited.
        error = abs(decoded[i, g, j] - float(values.view(np.float16)[i, g, j]))
        assert error <= 2.0 ** (t + c - 14) + 2.0 ** (c - 14)


# Layout


def some_codes(seed, tokens, kv, d):
    generator = np.random.default_rng(seed)
    return KeyCodes(
        generator.integers(-7, 8, (tokens, kv, d), dtype=np.int8),
        generator.integers(0, 256, (tokens, kv), dtype=np.uint8),
    )


def nested(codes):
    return list(zip(codes.exponents.tolist(), codes.codes.tolist(), strict=True))


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
    assert np.array_equal(back.exponents, codes.exponents)


def test_tokens_written_apart_lie_as_if_written_together():
    spec = KernelSpec(64, 2, 2, segment_tokens=512)
    codes = some_codes(1, 150, 2, 64)
    whole, parts = (np.zeros((value_segment_beats(spec), 64), np.uint8) for _ in range(2))
    write_values(whole, 0, codes, spec)
    for first, stop in ((100, 150), (0, 63), (63, 100)):
        part = KeyCodes(codes.codes[first:stop], codes.exponents[first:stop])
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
            shadow, 0, KeyCodes(np.full((1, 1, 64), 8, np.int8), np.zeros((1, 1), np.uint8)), spec
        )
    with pytest.raises(ValueError, match="a value shadow of"):
        read_values(shadow[1:], 0, 1, spec)


def test_a_value_shadow_of_64_channels_is_as_large_as_an_int4_key_shadow():
    spec = KernelSpec(64, 3, 3)
    assert value_segment_beats(spec) == spec.segment_beats
    assert value_segment_beats(KernelSpec(80, 3, 3)) > KernelSpec(80, 3, 3).segment_beats


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
