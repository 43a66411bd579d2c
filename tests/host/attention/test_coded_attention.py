# SPDX-License-Identifier: Apache-2.0
"""Native attention over rows and coded tokens against the golden model, to the bit."""

import numpy as np
import pytest
import torch
from coded_cases import (
    Layer,
    coded_attention,
    coded_segment,
    every_shape,
    every_variant,
    golden_coded_block,
    golden_products,
    same_bits,
    same_block,
)
from native_cases import shape_of

from hillinfer.model_shape import StoredType
from hillinfer.native.library import native_library
from hillinfer_bench.precision.coded_attention import CodePlaces
from hillinfer_model.coded_attention import attend, exact_block
from hillinfer_model.key_codes import INVALID_EXPONENT

# --- Blocks ---


@every_variant
@every_shape
@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_exact_blocks(variant, shape, count):
    layer = Layer(shape, count, ())
    found = coded_attention(variant, shape).exact_blocks(layer.scaled, layer.rows.addresses)
    rows = layer.golden_rows()
    for head in range(shape.kv_heads):
        products = golden_products(layer, head)
        for block, first in enumerate(range(0, count, 64)):
            own = slice(first, first + 64)
            expected = exact_block(products[:, own], rows.values[own, head])
            assert same_block(found, block, head, expected)
            found.outputs.view(np.int32)[block, head * shape.group_size, 0] ^= 1
            assert not same_block(found, block, head, expected)


@every_variant
@every_shape
@pytest.mark.parametrize("count", [1, 7, 64, 65, 200])
def test_coded_blocks(variant, shape, count):
    segment = coded_segment(shape, count)
    for native in (segment.in_shadow(), segment.in_rows()):
        found = coded_attention(variant, shape).coded_blocks(native)
        for head in range(shape.kv_heads):
            for block, first in enumerate(range(0, count, 64)):
                expected = golden_coded_block(segment, head, first)
                assert same_block(found, block, head, expected)
    # A code, an exponent and a mean that are others.
    for name in ("codes", "exponents", "means"):
        other = coded_segment(shape, count)
        kept = other.statistics if name == "means" else other.codes
        # Of the token that weighs most: what weighs less may not be seen.
        top = int(other.aligned[: shape.group_size, :64].max(axis=0).argmax())
        if name == "codes":
            kept.codes[top, 0] -= np.sign(kept.codes[top, 0]) | 1
        elif name == "exponents":
            kept.exponents[top, 0] += 1
        else:
            kept.means[0] += 1 << 10
        found = coded_attention(variant, shape).coded_blocks(other.in_shadow())
        assert not same_block(found, 0, 0, golden_coded_block(segment, 0, 0))


@every_variant
@every_shape
def test_tokens_that_lie_one_behind_the_other(variant, shape):
    """Exponents of a whole group are taken together, and not those of any 64 in a row."""
    layer = Layer(shape, 3, (130,))
    (segment,) = layer.segments
    segment.tokens = np.r_[64:128, 200:264, 300:302]
    attention = coded_attention(variant, shape)
    given = layer.scaled, layer.rows.addresses, [segment.in_shadow()]
    rows = layer.golden_rows()
    assert same_bits(attention.attend(*given), attend(layer.scaled, rows, [segment.golden()]))
    segment.codes.exponents[:64, -1] += 1
    assert not same_bits(attention.attend(*given), attend(layer.scaled, rows, [segment.golden()]))


@every_variant
@pytest.mark.parametrize("exponents", [(0, 1), (0, 22), (21, 22), (0, 255), (254, 255)])
@pytest.mark.parametrize("spread", [0.0, 0.01, 40.0, 30000.0])
def test_extreme_exponents_and_weights(variant, exponents, spread):
    shape = shape_of(2, 3, 64)
    segment = coded_segment(shape, 130, exponents=exponents, spread=spread)
    generator = np.random.default_rng(3)
    segment.statistics.exponents[:] = generator.integers(-14, 17, (2, 64))
    segment.statistics.means[:] = generator.integers(-(2**23) + 1, 2**23, (2, 64))
    found = coded_attention(variant, shape).coded_blocks(segment.in_rows())
    for head in range(2):
        for block in range(3):
            expected = golden_coded_block(segment, head, block * 64)
            assert same_block(found, block, head, expected)
    found.totals[2, 5] ^= 1
    assert not same_block(found, 2, 1, expected)


@every_variant
@pytest.mark.parametrize("limit", [2**31 - 1, 2**23, -(2**23), -(2**31)])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_products_at_their_limits(variant, limit, count):
    shape = shape_of(1, 2, 64)
    segment = coded_segment(shape, count)
    segment.aligned[0] = limit
    segment.aligned[1, ::2] = limit
    found = coded_attention(variant, shape).coded_blocks(segment.in_shadow())
    for block, first in enumerate(range(0, count, 64)):
        expected = golden_coded_block(segment, 0, first)
        assert same_block(found, block, 0, expected)
    found.powers[0, 1] += 1
    assert not same_block(found, 0, 0, golden_coded_block(segment, 0, 0))


@every_variant
@pytest.mark.parametrize("scale", [0.0, 1e-30, 300.0, 1e5, -1e5])
def test_exact_products_at_their_limits(variant, scale):
    shape = shape_of(1, 3, 80, StoredType.FLOAT16)
    layer = Layer(shape, 67, ())
    layer.scaled *= np.float32(scale)
    found = coded_attention(variant, shape).exact_blocks(layer.scaled, layer.rows.addresses)
    rows, products = layer.golden_rows(), golden_products(layer, 0)
    for block, first in enumerate((0, 64)):
        own = slice(first, first + 64)
        expected = exact_block(products[:, own], rows.values[own, 0])
        assert same_block(found, block, 0, expected)
    found.powers[1, 2] += 1
    assert not same_block(found, 1, 0, expected)


# --- One softmax ---


@every_variant
@every_shape
@pytest.mark.parametrize(
    ("exact", "coded"), [(1, ()), (70, (65, 0, 300)), (0, (1,)), (3, (64, 128)), (130, (1, 1, 1))]
)
def test_attention_over_both(variant, shape, exact, coded):
    layer = Layer(shape, exact, coded)
    attention = coded_attention(variant, shape)
    expected = attend(layer.scaled, layer.golden_rows(), [one.golden() for one in layer.segments])
    found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
    assert same_bits(found, expected)
    blocks = attention.exact_blocks(layer.scaled, layer.rows.addresses)
    for one in layer.native_segments():
        blocks += attention.coded_blocks(one)
    assert same_bits(attention.merge(blocks), expected)
    flipped = layer.scaled.copy()
    flipped[0] += np.float32(1)
    if exact and (exact > 1 or coded):
        assert not same_bits(
            attention.attend(flipped, layer.rows.addresses, layer.native_segments()), expected
        )
    if coded:
        for one in layer.segments:
            one.codes.codes[:] = np.maximum(one.codes.codes - 1, -7)
        found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
        assert not same_bits(found, expected)


@every_variant
def test_blocks_far_below_the_largest_add_nothing(variant):
    shape = shape_of(2, 2, 64)
    layer = Layer(shape, 5, (70, 70, 70), spread=2.0)
    attention = coded_attention(variant, shape)
    for number, below in enumerate((39, 40, 41)):
        layer.segments[number].aligned -= below * 256
    layer.segments[0].aligned[1] += 80 * 256
    golden = [one.golden() for one in layer.segments]
    expected = attend(layer.scaled, layer.golden_rows(), golden)
    found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
    assert same_bits(found, expected)
    layer.segments[0].aligned[1] -= 80 * 256
    found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
    assert not same_bits(found, expected)


@every_variant
def test_a_set_of_some_heads(variant):
    shape = shape_of(3, 2, 64)
    layer = Layer(shape, 9, (80,))
    attention = coded_attention(variant, shape)
    whole = attend(layer.scaled, layer.golden_rows(), [layer.segments[0].golden()])
    given = layer.scaled, layer.rows.addresses, layer.native_segments()
    found = attention.attend(*given, range(1, 3))
    assert same_bits(found[2:], whole[2:])
    assert not found[:2].any()
    assert whole[:2].any()


@every_variant
def test_threads_and_flushed_subnormal_numbers_change_no_bit(variant):
    shape = shape_of(3, 2, 80)
    layer = Layer(shape, 70, (200, 100))
    # Sums of such values are subnormal.
    for one in layer.segments:
        one.statistics.exponents[:] = -14
    layer.rows.values.mul_(0)
    layer.rows = type(layer.rows)(
        shape, 70, keys=layer.rows.keys.float() * 20, values=layer.rows.values.float() + 1e-38
    )
    attention = coded_attention(variant, shape)
    golden = [one.golden() for one in layer.segments]
    expected = attend(layer.scaled, layer.golden_rows(), golden)
    given = layer.scaled, layer.rows.addresses, layer.native_segments()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.set_flush_denormal(count == 2)
            assert same_bits(attention.attend(*given), expected)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    layer.rows.memory[layer.rows.places[:, np.newaxis], -1] ^= 1
    assert not same_bits(attention.attend(*given), expected)


# --- What is no number ---


@every_variant
def test_invalid_tokens_break_the_heads_of_their_kv_head(variant):
    shape = shape_of(2, 3, 64)
    layer = Layer(shape, 3, (64, 9))
    attention = coded_attention(variant, shape)

    def check(broken):
        golden = [one.golden() for one in layer.segments]
        expected = attend(layer.scaled, layer.golden_rows(), golden)
        found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
        assert same_bits(found, expected)
        assert np.isnan(found).all(axis=1).tolist() == broken
        blocks = attention.coded_blocks(layer.segments[1].in_rows())
        for head in range(2):
            assert same_block(blocks, 0, head, golden_coded_block(layer.segments[1], head, 0))

    check([False] * 6)
    # Even where the block adds nothing.
    layer.segments[1].aligned[:] -= 2000 * 256
    layer.segments[1].codes.exponents[8, 1] = INVALID_EXPONENT
    check([False] * 3 + [True] * 3)
    layer.segments[0].invalid_keys[63, 0] = True
    check([True] * 6)


@every_variant
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_rows_that_hold_no_numbers(variant, value, where):
    shape = shape_of(2, 2, 64, StoredType.FLOAT16)
    layer = Layer(shape, 70, (9,))
    given = {"keys": layer.rows.keys.float(), "values": layer.rows.values.float()}
    given[where][1, 66, 3] = value
    layer.rows = type(layer.rows)(shape, 70, **given)
    layer.scaled[2, 3] = 1
    layer.scaled[3, 3] = 0
    attention = coded_attention(variant, shape)
    expected = attend(layer.scaled, layer.golden_rows(), [layer.segments[0].golden()])
    found = attention.attend(layer.scaled, layer.rows.addresses, layer.native_segments())
    assert same_bits(found, expected)
    assert not np.isfinite(found).all() or value == float("-inf") or where == "keys"
    found.view(np.int32)[0, 0] ^= 1
    assert not same_bits(found, expected)


# --- What is refused ---


def test_what_does_not_fit_is_refused():
    shape = shape_of(2, 2, 64)
    layer = Layer(shape, 3, (9,))
    attention = coded_attention(*_best(), shape)
    rows, coded = layer.rows.addresses, layer.native_segments()
    with pytest.raises(ValueError, match="both sets are empty"):
        attention.attend(layer.scaled, rows[:0], [])
    with pytest.raises(ValueError, match="not float32"):
        attention.attend(layer.scaled.astype(np.float64), rows, coded)
    with pytest.raises(ValueError, match="address 0"):
        attention.attend(layer.scaled, rows * np.uint64(0), coded)
    with pytest.raises(ValueError, match="KV heads"):
        attention.attend(layer.scaled, rows, coded, range(1, 4))
    layer.segments[0].aligned = layer.segments[0].aligned.astype(np.int64)
    with pytest.raises(ValueError, match="L' of int64"):
        attention.attend(layer.scaled, rows, layer.native_segments())
    with pytest.raises(ValueError, match="no block"):
        attention.merge(attention.exact_blocks(layer.scaled, rows[:0]))
    with pytest.raises(ValueError, match="at most 256"):
        coded_attention(*_best(), shape_of(1, 1, 512))


def test_places_outside_their_memory_are_refused():
    segment = coded_segment(shape_of(2, 2, 64), 3)
    spec, shadow = segment.spec, segment.in_shadow().places.memory
    with pytest.raises(IndexError, match="of 1024"):
        CodePlaces.in_shadow(shadow, np.array([0, 1024]), spec)
    with pytest.raises(ValueError, match="value shadow"):
        CodePlaces.in_shadow(shadow[1:], np.array([0]), spec)
    memory = segment.in_rows().places.memory
    with pytest.raises(IndexError, match="of 7"):
        CodePlaces.in_rows(memory, np.array([7]), spec)
    with pytest.raises(ValueError, match="hold no codes"):
        CodePlaces.in_rows(np.zeros((2, 65), np.uint8), np.array([0]), spec)


def _best():
    return native_library().variants[:1]
