# SPDX-License-Identifier: Apache-2.0
"""Native attention against float64, against torch, and against itself however it is called."""

import os

import numpy as np
import pytest
import torch
from native_cases import (
    Rows,
    every_type,
    every_variant,
    flip_bit,
    native_attention,
    same_bits,
    shape_of,
)

from hillinfer.attention.kernels import MOST_GROUP_SIZE
from hillinfer.model_shape import StoredType
from hillinfer.native.library import NativeError, native_library
from hillinfer.native.structures import row_addresses
from hillinfer_bench.native_reads import read_rows
from hillinfer_bench.precision.in_place_attention import InPlaceAttention

# KV heads, group size, head_dim; each of the loops' remainders, and real models.
SHAPES = [
    *((3, 3, 64), (8, 3, 128), (2, 1, 80), (2, 2, 96), (1, 16, 64), (40, 1, 128), (1, 71, 64)),
    *((2, 4, 8), (3, 5, 12), (1, 7, 37), (2, 1, 1), (5, 8, 256), (1, 6, 120)),
]
COUNTS = [1, 2, 63, 64, 65, 511, 513, 1300]
# Scores are a few units, so float32 leaves them off by some 2^-22 and the weights by as much of
# themselves; outputs are weighted means of values that are seldom above 4.
TOLERANCE = 2e-6


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attend(attention, rows):
    return attention.attend(rows.query, rows.scaling, [rows.addresses])


@every_variant
@every_type
@pytest.mark.parametrize(("kv_heads", "group_size", "head_dim"), SHAPES)
def test_near_float64(variant, stored_type, kv_heads, group_size, head_dim):
    shape = shape_of(kv_heads, group_size, head_dim, stored_type)
    rows = Rows(shape, 150)
    out = attend(native_attention(variant, shape), rows)
    assert out.dtype == torch.float32
    assert (out - rows.exact()).abs().max() < TOLERANCE


@every_variant
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_rows(variant, count):
    shape = shape_of(2, 3, 64)
    rows = Rows(shape, count)
    attention = native_attention(variant, shape)
    out = attend(attention, rows)
    assert (out - rows.exact()).abs().max() < TOLERANCE
    # Each row counts: the last one, too.
    rows.memory[rows.places[-1]] = 0
    assert not (attend(attention, rows) - out).abs().max() < TOLERANCE


@every_variant
@every_type
def test_as_near_to_float64_as_torch(variant, stored_type):
    shape = shape_of(4, 2, 128, stored_type)
    rows = Rows(shape, 1000)
    found = (attend(native_attention(variant, shape), rows) - rows.exact()).abs().max()
    torchs = torch.nn.functional.scaled_dot_product_attention(
        rows.query[None, :, None],
        rows.keys[None].float(),
        rows.values[None].float(),
        scale=rows.scaling,
        enable_gqa=True,
    )[0, :, 0]
    assert (found - 2 * (torchs - rows.exact()).abs().max()) < 1e-7


@every_variant
@pytest.mark.parametrize("byte", [0, 1, -2, -1], ids="byte {}".format)
def test_a_flipped_bit_shows(variant, byte):
    shape = shape_of(1, 1, 64)
    rows = Rows(shape, 70)
    attention = native_attention(variant, shape)
    before = attend(attention, rows)
    assert same_bits(attend(attention, rows), before)
    flip_bit(rows, 69, byte, 6)
    assert not same_bits(attend(attention, rows), before)


@every_variant
def test_rows_of_one_tile_in_another_order_are_another_sum(variant):
    shape = shape_of(1, 1, 64)
    rows = Rows(shape, 64)
    attention = native_attention(variant, shape)
    before = attend(attention, rows)
    after = attention.attend(rows.query, rows.scaling, [rows.addresses[::-1].copy()])
    assert (before - after).abs().max() < TOLERANCE
    assert not same_bits(before, after)


@every_variant
def test_bits_do_not_depend_on_addresses(variant):
    shape = shape_of(3, 3, 40)
    rows = Rows(shape, 700)
    attention = native_attention(variant, shape)
    before = attend(attention, rows)
    # One byte off any alignment, and in another order in memory.
    memory = np.empty(rows.memory.size + 1, np.uint8)[1:].reshape(rows.memory.shape)
    places = np.random.default_rng(5).permutation(len(memory))[: len(rows.places)]
    memory[places] = rows.memory[rows.places]
    assert memory.ctypes.data % 2
    after = attention.attend(rows.query, rows.scaling, [row_addresses(memory, places)])
    assert same_bits(before, after)


@every_variant
@pytest.mark.parametrize("sets", [1, 5])
def test_bits_do_not_depend_on_threads(variant, sets, threads):
    shape = shape_of(5, 2, 64)
    rows = Rows(shape, 5000)
    attention = native_attention(variant, shape)
    own = [rows.addresses[i * 100 :] for i in range(sets)]
    threads(1)
    expected = attention.attend(rows.query, rows.scaling, own)
    for count in (2, 3, 7, 16):
        threads(count)
        assert same_bits(attention.attend(rows.query, rows.scaling, own), expected)


@every_variant
@pytest.mark.parametrize("count", [1, 3])
def test_flushed_subnormal_numbers_change_no_bit(variant, count, threads):
    shape = shape_of(3, 2, 64)
    rows = Rows(shape, 5000)
    rows = Rows(shape, 5000, keys=rows.keys, values=rows.values.float() * 2.0**-126)
    attention = native_attention(variant, shape)
    threads(1)
    expected = attend(attention, rows)
    subnormal = (expected != 0) & (expected.abs() < 2.0**-126)
    assert subnormal.any()
    threads(count)
    torch.set_flush_denormal(True)
    try:
        found = attend(attention, rows)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(found, expected)


@every_variant
@pytest.mark.parametrize("step", [64, 192, 512, 1024, 36_864])
def test_bits_do_not_depend_on_calls(variant, step):
    """Also over so many rows that partials are merged in between."""
    shape = shape_of(1, 2, 16)
    rows = Rows(shape, 40_000)
    attention = native_attention(variant, shape)
    softmax = attention.begin(rows.query, rows.scaling)
    addresses = rows.addresses
    for start in range(0, len(addresses), step):
        softmax.add([addresses[start : start + step]])
        softmax.add([addresses[:0]])
    assert same_bits(softmax.result(), attend(attention, rows))
    assert (softmax.result() - rows.exact()).abs().max() < TOLERANCE


@every_variant
def test_results_on_the_way_change_nothing(variant):
    shape = shape_of(2, 2, 64)
    rows = Rows(shape, 640)
    softmax = native_attention(variant, shape).begin(rows.query, rows.scaling)
    softmax.add([rows.addresses[:64]])
    early = softmax.result()
    softmax.add([rows.addresses[64:]])
    late = softmax.result()
    assert same_bits(late, attend(native_attention(variant, shape), rows))
    assert not same_bits(early, late)


@every_variant
@pytest.mark.parametrize(("kv_heads", "group_size", "head_dim"), [(3, 3, 64), (8, 1, 128)])
def test_each_kv_head_attends_to_its_own_set(variant, kv_heads, group_size, head_dim):
    shape = shape_of(kv_heads, group_size, head_dim)
    rows = Rows(shape, 1500)
    attention = native_attention(variant, shape)
    own = [rows.addresses[head * 10 : 600 + head * 100] for head in range(kv_heads)]
    out = attention.attend(rows.query, rows.scaling, own)
    softmax = attention.begin(rows.query, rows.scaling)
    for start in range(0, 1500, 128):
        softmax.add([part[start : start + 128] for part in own])
    assert same_bits(softmax.result(), out)
    for head in range(kv_heads):
        alone = attention.attend(rows.query, rows.scaling, [own[head]])
        heads = slice(head * group_size, (head + 1) * group_size)
        assert same_bits(out[heads], alone[heads])
        others = attention.attend(rows.query, rows.scaling, [own[head - 1]])
        assert not same_bits(out[heads], others[heads])


@every_variant
@pytest.mark.parametrize("size", [1e4, 1e15])
def test_huge_scores_do_not_overflow(variant, size):
    """Of scores this far apart the softmax takes the largest one's value."""
    shape = shape_of(1, 2, 64)
    keys = torch.randn((1, 900, 64), generator=torch.Generator().manual_seed(1)) * size
    rows = Rows(shape, 900, keys=keys)
    out = attend(native_attention(variant, shape), rows)
    scores = rows.query.double() @ rows.keys[0].double().T
    assert torch.equal(out, rows.values[0][scores.argmax(-1)].float())


@every_variant
def test_a_query_that_sees_all_rows_alike_gets_their_mean(variant):
    shape = shape_of(1, 1, 64)
    rows = Rows(shape, 1000)
    rows.query = torch.zeros(1, 64)
    out = attend(native_attention(variant, shape), rows)
    assert (out - rows.values[0].double().mean(0)).abs().max() < TOLERANCE


def as_torch(rows):
    """The output in float32, by definition."""
    scores = rows.query @ rows.keys[0].float().T * rows.scaling
    return scores.softmax(-1) @ rows.values[0].float()


@every_variant
@every_type
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("row", [0, 5, 70, 599])
@pytest.mark.parametrize("place", ["keys", "values"])
def test_nan_and_infinities_spread_as_in_torch(variant, stored_type, bad, row, place):
    shape = shape_of(1, 3, 48, stored_type)
    rows = Rows(shape, 600)
    states = {"keys": rows.keys.float(), "values": rows.values.float()}
    states[place][0, row, 7] = bad
    changed = Rows(shape, 600, **states)
    changed.query = rows.query
    out, expected = attend(native_attention(variant, shape), changed), as_torch(changed)
    assert not expected.isfinite().all() or (expected.isfinite().all() and place == "keys")
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.allclose(out[finite], expected[finite], atol=1e-5)


@every_variant
@pytest.mark.parametrize("count", [1, 64, 65, 600])
def test_nothing_but_infinite_scores_is_nan(variant, count):
    shape = shape_of(1, 1, 16)
    rows = Rows(shape, count, keys=torch.full((1, count, 16), -torch.inf))
    rows.query = rows.query.abs()
    assert attend(native_attention(variant, shape), rows).isnan().all()


@every_variant
def test_infinitely_small_scores_at_first_are_left_out(variant):
    shape = shape_of(1, 1, 16)
    keys = torch.zeros(1, 700, 16)
    keys[:, :600] = -torch.inf
    rows = Rows(shape, 700, keys=keys)
    rows.query = rows.query.abs()
    out = attend(native_attention(variant, shape), rows)
    assert (out - rows.values[0, 600:].double().mean(0)).abs().max() < TOLERANCE


@every_variant
def test_every_number_widens_as_in_torch(variant):
    """All 65,536 of a type, as values of one row each."""
    for stored_type in StoredType:
        shape = shape_of(1, 1, 256, stored_type)
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).reshape(256, 256)
        kind = torch.bfloat16 if stored_type is StoredType.BFLOAT16 else torch.float16
        values = bits.view(kind)
        attention = native_attention(variant, shape)
        for row in values:
            rows = Rows(shape, 1, keys=torch.zeros(1, 1, 256), values=row[None, None])
            out = attend(attention, rows)[0]
            expected = row.float()
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_the_fastest_variant_is_taken():
    library = native_library()
    assert library.tile_rows == 64
    assert InPlaceAttention(shape_of(1, 1, 16)).variant is library.variants[0]


def test_the_callers_query_may_go(threads):
    shape = shape_of(2, 2, 64)
    rows = Rows(shape, 100)
    attention = InPlaceAttention(shape)
    query = rows.query.clone()
    softmax = attention.begin(query, rows.scaling)
    query.zero_()
    softmax.add([rows.addresses])
    assert same_bits(softmax.result(), attend(attention, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_queries_of_other_types(dtype):
    shape = shape_of(2, 2, 64)
    rows = Rows(shape, 100)
    rows.query = rows.query.to(dtype)
    out = attend(InPlaceAttention(shape), rows)
    assert (out - rows.exact()).abs().max() < TOLERANCE


def test_bad_arguments():
    shape = shape_of(2, 2, 64)
    rows = Rows(shape, 100)
    attention = InPlaceAttention(shape)
    query, own = rows.query, rows.addresses
    with pytest.raises(ValueError, match=r"\(3, 64\), not \(4, 64\)"):
        attention.begin(query[:3], 0.1)
    with pytest.raises(ValueError, match=r"int64 on cpu"):
        attention.begin(query.long(), 0.1)
    with pytest.raises(ValueError, match="meta"):
        attention.begin(query.to("meta"), 0.1)
    with pytest.raises(ValueError, match="nan is not finite"):
        attention.begin(query, float("nan"))
    for sets in ([], [own] * 3):
        with pytest.raises(ValueError, match=f"{len(sets)} sets of rows: give 1, or 2"):
            attention.attend(query, 0.1, sets)
    for wrong in (own.astype(np.int64), own[::2], own.reshape(2, 50)):
        with pytest.raises(ValueError, match="contiguous uint64 vector"):
            attention.attend(query, 0.1, [wrong])
    zeroed = own.copy()
    zeroed[17] = 0
    with pytest.raises(ValueError, match="row 17 of 100 has the address 0"):
        attention.attend(query, 0.1, [zeroed])
    with pytest.raises(ValueError, match="no rows"):
        attention.attend(query, 0.1, [own[:0]])
    with pytest.raises(ValueError, match="no rows"):
        attention.attend(query, 0.1, [own, own[:0]])
    with pytest.raises(ValueError, match="129 query heads per KV head"):
        InPlaceAttention(shape_of(1, MOST_GROUP_SIZE + 1, 64))


def test_bad_orders_of_calls():
    shape = shape_of(2, 2, 64)
    rows = Rows(shape, 200)
    softmax = InPlaceAttention(shape).begin(rows.query, rows.scaling)
    softmax.add([rows.addresses[:100]])
    with pytest.raises(ValueError, match=r"100 rows after 100: .* multiple of 64"):
        softmax.add([rows.addresses[100:]])
    with pytest.raises(ValueError, match="2 sets of rows after 1"):
        softmax.add([rows.addresses[:64]] * 2)
    # What was refused changed nothing.
    expected = InPlaceAttention(shape).attend(rows.query, rows.scaling, [rows.addresses[:100]])
    assert same_bits(softmax.result(), expected)


def test_a_variant_of_another_processor():
    missing = "neon" if os.uname().machine == "x86_64" else "avx2"
    variant = next(one for one in type(native_library().variants[0]) if one.value == missing)
    with pytest.raises(NativeError, match=f"no {missing}"):
        InPlaceAttention(shape_of(1, 1, 16), variant)


@every_variant
def test_reading_rows_reads_each_of_their_words(variant):
    shape = shape_of(3, 1, 64)
    native_attention(variant, shape)
    rows = Rows(shape, 1030)
    words = rows.memory[rows.places].view(np.uint64)
    expected = int(words.sum(dtype=np.uint64))
    for threads in (1, 3):
        found = read_rows(variant, rows.addresses, shape.row_bytes, threads)
        assert found == expected
    flip_bit(rows, 1029, -1, 0)
    assert read_rows(variant, rows.addresses, shape.row_bytes, 1) != expected


def test_addresses_of_rows():
    memory = np.zeros((5, 64), np.uint8)
    found = row_addresses(memory, np.array([4, 0]))
    assert found.dtype == np.uint64
    assert found.tolist() == [memory[4].ctypes.data, memory.ctypes.data]
    for wrong in ([5], [-1]):
        with pytest.raises(IndexError, match="of 5"):
            row_addresses(memory, np.array(wrong))
    for gaps in (memory[:, ::2], memory[0]):
        with pytest.raises(ValueError, match="contiguous"):
            row_addresses(gaps, np.array([0]))
