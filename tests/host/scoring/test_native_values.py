# SPDX-License-Identifier: Apache-2.0
"""Native value codes against the golden model, to the byte."""

import numpy as np
import pytest
import torch
from native_variants import every_variant

from hillinfer.native.library import native_library
from hillinfer.scoring.native import NativeScorer
from hillinfer_bench.precision.coded_attention import ShadowValueCoder
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_codes import encode_values, value_statistics
from hillinfer_model.value_layout import (
    code_row_bytes,
    read_values,
    value_segment_beats,
    write_values,
)

SHAPES = [(1, 64), (3, 64), (2, 80), (2, 128), (1, 48), (1, 256)]


def coder(variant, spec):
    if variant not in native_library().variants:
        pytest.skip(f"this processor has no {variant.value}")
    return ShadowValueCoder(spec, variant)


def spec_of(kv_heads, dim, mode=KeyMode.INT4):
    return KernelSpec(dim, kv_heads, 1, mode, segment_tokens=512)


def some_values(spec, tokens, seed=0):
    """Values of any size, with infinities, subnormal numbers and a NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = tokens, spec.kv_heads, spec.head_dim
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-26, 17, (tokens, 1, 1), generator=generator))
    values = values.to(torch.float16)
    values[tokens // 2, 0, 5] = float("inf")
    values[tokens // 3, -1, 7] = float("-inf")
    values[tokens - 1, 0, 0] = float("nan")
    return values


def statistics_of(spec, seed=0):
    generator = np.random.default_rng(seed)
    shape = spec.kv_heads, spec.head_dim
    return ChannelStatistics(
        generator.integers(-14, 17, shape, dtype=np.int8),
        generator.integers(-(2**14), 2**14, shape, dtype=np.int32),
    )


def golden(values, statistics, first, spec):
    codes = encode_values(values.numpy().view(np.uint16), statistics)
    shadow = np.zeros((value_segment_beats(spec), 64), np.uint8)
    write_values(shadow, first, codes, spec)
    return codes, shadow


@every_variant
@pytest.mark.parametrize(("kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("mode", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (0, 64), (0, 65), (62, 5), (60, 150)])
def test_value_shadows(variant, kv_heads, dim, mode, first, tokens):
    spec = spec_of(kv_heads, dim, mode)
    values, statistics = some_values(spec, tokens), statistics_of(spec)
    _, expected = golden(values, statistics, first, spec)
    shadow = np.zeros_like(expected)
    own = coder(variant, spec)
    own.encode(values, statistics, shadow, first)
    assert np.array_equal(shadow, expected)
    # The same numbers, each channel's tokens together.
    strided = values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    shadow[:] = 0
    own.encode(strided, statistics, shadow, first)
    assert np.array_equal(shadow, expected)
    values[0, 0] = 60000 * (1 - 2 * (torch.arange(dim) % 2))
    own.encode(values, statistics, shadow, first)
    assert not np.array_equal(shadow, expected)


@every_variant
@pytest.mark.parametrize(("kv_heads", "dim"), SHAPES)
def test_tokens_by_themselves(variant, kv_heads, dim):
    spec = spec_of(kv_heads, dim)
    values, statistics = some_values(spec, 70), statistics_of(spec)
    codes, shadow = golden(values, statistics, 0, spec)
    own, half = coder(variant, spec), code_row_bytes(spec)
    rows = np.full((70, own.row_bytes + 5), 0xA5, np.uint8)
    own.encode_rows(values, statistics, rows)
    assert np.array_equal(rows[:, half : half + kv_heads], codes.exponents)
    for token in (0, 63, 64, 69):
        # A shadow of this token alone has its code row behind the exponents.
        alone = np.zeros_like(shadow)
        one = type(codes)(codes.codes[token : token + 1], codes.exponents[token : token + 1])
        write_values(alone, 0, one, spec)
        row = alone.reshape(-1)[64 * kv_heads : 64 * kv_heads + half]
        assert np.array_equal(rows[token, :half], row)
        rows[token, half - 1] ^= 16
        assert not np.array_equal(rows[token, :half], row)
    assert (rows[:, half + kv_heads :] == 0xA5).all()


@every_variant
def test_statistics_and_codes_of_a_segment_of_values(variant):
    spec = spec_of(2, 64)
    values = torch.randn((256, 2, 64), generator=torch.Generator().manual_seed(1)).half()
    scorer = NativeScorer(spec, Scope.LAYER, variant)
    taken = scorer.statistics(values, 0, None)
    expected = value_statistics(values.numpy().view(np.uint16), 0, 512, None)
    assert np.array_equal(taken.means, expected.means)
    assert np.array_equal(taken.exponents, expected.exponents)
    shadow = np.zeros((value_segment_beats(spec), 64), np.uint8)
    coder(variant, spec).encode(values, taken, shadow, 0)
    found = read_values(shadow, 0, 256, spec)
    codes = encode_values(values.numpy().view(np.uint16), expected)
    assert np.array_equal(found.codes, codes.codes)
    assert np.array_equal(found.exponents, codes.exponents)
    expected.means[0, 0] += 1 << 12
    other = encode_values(values.numpy().view(np.uint16), expected)
    assert not np.array_equal(found.codes, other.codes)


def test_what_does_not_fit_is_refused():
    spec = spec_of(2, 64)
    own, statistics = ShadowValueCoder(spec), statistics_of(spec)
    values = some_values(spec, 4)
    shadow = np.zeros((value_segment_beats(spec), 64), np.uint8)
    for wrong, given in (
        ("float16", (values.float(), statistics, shadow, 0)),
        ("statistics of shape", (values, statistics_of(spec_of(1, 64)), shadow, 0)),
        ("value shadow", (values, statistics, shadow[1:], 0)),
        ("outside a segment", (values, statistics, shadow, 509)),
        ("outside a segment", (values, statistics, shadow, -1)),
    ):
        with pytest.raises(ValueError, match=wrong):
            own.encode(*given)
    with pytest.raises(ValueError, match="or more"):
        own.encode_rows(values, statistics, np.zeros((4, own.row_bytes - 1), np.uint8))
    assert not shadow.any()
