# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
from golden_inputs import bit_flipped, random_keys, random_query, same_statistics, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden import GoldenModel
from hillinfer_model.integers import shift_half_up
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch import (
    Descriptor,
    ErrorCode,
    LaunchError,
    QueryBlock,
    StatusBeat,
    beat_count,
    check_score_descriptor,
    check_shadow_descriptor,
    cut_blocks,
    make_query_block,
    make_tuples,
    pack_score_array,
    pack_statistics,
    ranking_keys,
    unpack_score_array,
    unpack_statistics,
)
from hillinfer_model.offsets import offsets
from hillinfer_model.query_codes import QueryCodes, encode_query
from hillinfer_model.scores import score_codes

U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


def expect(code, function, *arguments):
    with pytest.raises(LaunchError) as caught:
        function(*arguments)
    assert caught.value.code is code
    return str(caught.value)


# Descriptor


def test_a_descriptor_has_its_known_bytes():
    beat = Descriptor(
        shadow=0x0102030405060708,
        query=0x11,
        score=0x2200,
        base_position=0x10000,
        tokens=1024,
        row_stride=6,
        score_stride=64,
        statistics=0xFF00000000000000,
    ).pack()
    assert beat.tobytes().hex() == (
        "0807060504030201"
        "1100000000000000"
        "0022000000000000"
        "0000010000000000"
        "00040000"
        "06000000"
        "40000000"
        "00000000"
        "00000000000000ff"
        "0000000000000000"
    )
    assert beat.shape == (1, 64)


@settings(max_examples=50, deadline=None)
@given(st.tuples(U64, U64, U64, U64, U32, U32, U32, U64))
def test_descriptor_round_trip(values):
    assert Descriptor.unpack(Descriptor(*values).pack()) == Descriptor(*values)


@pytest.mark.parametrize("byte", [*range(44, 48), *range(56, 64)])
def test_a_reserved_descriptor_byte_is_refused(byte):
    beat = Descriptor(1, 2, 3, 1024, 5).pack()
    expect(ErrorCode.RESERVED_NOT_ZERO, Descriptor.unpack, bit_flipped(beat, (0, byte), 7))


@pytest.mark.parametrize("byte", [*range(44), *range(48, 56)])
def test_every_other_descriptor_byte_is_read(byte):
    beat = Descriptor(1, 2, 3, 1024, 5).pack()
    assert Descriptor.unpack(bit_flipped(beat, (0, byte), 3)) != Descriptor.unpack(beat)


def test_values_that_do_not_fit_their_field_are_refused():
    for field in dataclasses.fields(Descriptor):
        bits = 32 if field.name in ("tokens", "row_stride", "score_stride") else 64
        good = dict.fromkeys(("shadow", "query", "score", "base_position", "tokens"), 0)
        Descriptor(**{**good, field.name: 2**bits - 1})
        for bad in (2**bits, -1):
            with pytest.raises(ValueError, match=f"{field.name}={bad}"):
                Descriptor(**{**good, field.name: bad})


STORED = KernelSpec(64, 2, 3, key_mode=KeyMode.INT4)
CAST = KernelSpec(80, 2, 3, key_mode=KeyMode.FP16)


@pytest.mark.parametrize(
    ("spec", "scope", "good", "bad"),
    [
        (STORED, Scope.LAYER, {"base_position": 65_536}, {"base_position": 512}),
        (STORED, Scope.LAYER, {"base_position": 2**40}, {"base_position": 2**40 + 1}),
        (STORED, Scope.LAYER, {"tokens": 0}, {"tokens": 1025}),
        (STORED, Scope.LAYER, {"row_stride": 0}, {"row_stride": 4}),
        (STORED, Scope.LAYER, {"statistics": 0}, {"statistics": 1}),
        (STORED, Scope.LAYER, {"score_stride": 0}, {"score_stride": 64}),
        (STORED, Scope.KV_HEAD, {"score_stride": 64}, {"score_stride": 63}),
        # Two heads of 80 FP16 channels are exactly five beats.
        (CAST, Scope.LAYER, {"row_stride": 5}, {"row_stride": 4}),
        (CAST, Scope.LAYER, {"row_stride": 10, "statistics": 9}, {"row_stride": 0}),
    ],
)
def test_score_descriptors(spec, scope, good, bad):
    sound = Descriptor(
        0,
        0,
        0,
        1024,
        1024,
        row_stride=5 if spec is CAST else 0,
        score_stride=64 if scope is Scope.KV_HEAD else 0,
    )
    check_score_descriptor(dataclasses.replace(sound, **good), spec, scope)
    wrong = dataclasses.replace(sound, **bad)
    message = expect(ErrorCode.DESCRIPTOR, check_score_descriptor, wrong, spec, scope)
    name, value = next(iter(bad.items()))
    assert f"{name} is {value}" in message


@pytest.mark.parametrize(
    "bad",
    [
        {"score": 1},
        {"score_stride": 1},
        {"row_stride": 3},
        {"base_position": 64},
        {"tokens": 1025},
    ],
)
def test_shadow_descriptors(bad):
    sound = Descriptor(7, 8, 0, 2048, 100, row_stride=4, statistics=3)
    check_shadow_descriptor(sound, STORED)
    wrong = dataclasses.replace(sound, **bad)
    expect(ErrorCode.DESCRIPTOR, check_shadow_descriptor, wrong, STORED)
    expect(ErrorCode.DESCRIPTOR, check_shadow_descriptor, sound, CAST)


# Statistics block


def test_a_statistics_block_has_its_known_bytes():
    spec = KernelSpec(2, 2, 1)
    block = pack_statistics(statistics_of([[4, -14], [16, 0]], [[-1, 5], [2**23 - 1, -2]]), spec)
    assert block.shape == (8, 64)
    assert block[0, :8].tobytes().hex() == "ffffff04050000f2"
    assert block[4, :8].tobytes().hex() == "ffff7f10feffff00"
    assert block.sum() == block[[0, 4], :8].sum()


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(1, 1), (16, 3), (80, 2), (256, 40)])
def test_statistics_round_trip(head_dim, kv_heads):
    spec = KernelSpec(head_dim, kv_heads, 1)
    generator = np.random.default_rng(1)
    shape = (kv_heads, head_dim)
    statistics = statistics_of(
        generator.integers(-14, 17, shape), generator.integers(-(2**23) + 1, 2**23, shape)
    )
    block = pack_statistics(statistics, spec)
    found = unpack_statistics(block, spec)
    assert same_statistics(found, statistics)
    assert (found.exponents.dtype, found.means.dtype) == (np.int8, np.int32)
    for byte in range(4):
        assert not same_statistics(
            unpack_statistics(bit_flipped(block, (0, byte), 4), spec), statistics
        )


def test_wrong_statistics_are_refused():
    spec = KernelSpec(16, 1, 1)
    sound = statistics_of(np.zeros((1, 16)), np.zeros((1, 16)))
    block = pack_statistics(sound, spec)
    expect(ErrorCode.RESERVED_NOT_ZERO, unpack_statistics, bit_flipped(block, (1, 0), 0), spec)
    with pytest.raises(ValueError, match="statistics block"):
        unpack_statistics(block[:-1], spec)
    with pytest.raises(ValueError, match="do not fit the spec"):
        pack_statistics(statistics_of([[0]], [[0]]), spec)
    with pytest.raises(ValueError, match="24 bits"):
        pack_statistics(statistics_of(np.zeros((1, 16)), np.full((1, 16), -(2**23))), spec)


# Query block


def query_codes(spec, seed=1):
    generator = np.random.default_rng(seed)
    heads = spec.scored_heads
    return QueryCodes(
        generator.integers(-127, 128, (heads, spec.head_dim), dtype=np.int8),
        generator.integers(-128, 128, heads).astype(np.int8),
        generator.integers(-(2**23) + 1, 2**23, heads).astype(np.int32),
    )


def test_a_query_block_has_its_known_bytes():
    # kv = 2, G = 3, four slices: 6 int32 in a beat, 6 int8 in a beat, 2·4·3·16 bytes in six.
    spec = KernelSpec(64, 2, 3)
    query = QueryCodes(
        np.arange(6, dtype=np.int8)[:, np.newaxis] * 10 + np.arange(64, dtype=np.int8) // 16,
        np.array([-1, 0, 1, 2, 3, -7], dtype=np.int8),
        np.array([5, 0, 0, 0, 0, -1], dtype=np.int32),
    )
    base = np.array([7, 0, 0, 0, 0, 1], dtype=np.int64)
    block = make_query_block(query, base, spec, Scope.LAYER).pack(spec)
    assert block.shape == (8, 64)
    assert block[0].tobytes().hex() == "feffffff" + "00000000" * 4 + "feffffff" + "00" * 40
    assert block[1].tobytes().hex() == "ff00010203f9" + "00" * 58
    # Head tens, slice ones; KV head 0 holds heads 0..2.
    rows = block[2:].reshape(24, 16)
    assert np.all(rows == rows[:, :1])
    assert rows[:, 0].tolist() == [
        0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23,
        30, 40, 50, 31, 41, 51, 32, 42, 52, 33, 43, 53,
    ]  # fmt: skip


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("shape", [(16, 1, 1), (80, 3, 5), (64, 40, 8), (256, 2, 7)])
def test_query_block_round_trip(shape, rule):
    spec = KernelSpec(*shape, rule=rule)
    query = query_codes(spec)
    scope = Scope.KV_HEAD
    base = np.arange(spec.scored_heads, dtype=np.int64) * 1000
    block = make_query_block(query, base, spec, scope)
    packed = block.pack(spec)
    heads = spec.scored_heads
    assert packed.shape[0] == (
        beat_count(4 * heads) + beat_count(heads) + beat_count(heads * spec.padded_head_dim)
    )
    found = QueryBlock.unpack(packed, spec)
    assert same_block(found, block)
    for beat in (0, beat_count(4 * heads), beat_count(4 * heads) + beat_count(heads)):
        assert not same_block(QueryBlock.unpack(bit_flipped(packed, (beat, 0), 5), spec), block)


def same_block(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("addends", "exponents", "codes")
    )


def test_raw_sum_subtracts_its_offset_once_per_set():
    spec = KernelSpec(16, 3, 4, rule=Rule.RAW_SUM)
    query = query_codes(spec)
    o = query.corrections.tolist()
    layer = make_query_block(query, np.array([1000]), spec, Scope.LAYER)
    assert layer.addends.tolist() == [o[0] - 1000, o[1], o[2]]
    heads = make_query_block(query, np.array([1, 2, 3]), spec, Scope.KV_HEAD)
    assert heads.addends.tolist() == [o[0] - 1, o[1] - 2, o[2] - 3]
    assert query.corrections.tolist() == o


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
def test_a_kernel_that_reads_the_block_gets_the_golden_scores(rule, scope):
    # What a kernel does with the block: L plus the addend, no offset of its own.
    spec = KernelSpec(16, 2, 3, key_mode=KeyMode.INT8, rule=rule, segment_tokens=512)
    model = GoldenModel(spec, scope)
    keys, query = random_keys(1, 300, 2, 16), random_query(2, 6, 16) / 8
    segments = model.encode_sequence(keys)
    codes = encode_query(query, segments[0].statistics, 0.25, spec)
    aligned, invalid = model.aligned(query, 0.25, segments)
    block = make_query_block(codes, offsets(aligned, invalid, spec, scope), spec, scope)
    block = QueryBlock.unpack(block.pack(spec), spec)

    per_kv = spec.scored_heads // 2
    key_codes = segments[0].codes.codes.astype(np.int64).repeat(per_kv, axis=1)
    exponents = segments[0].codes.exponents.astype(np.int64).repeat(per_kv, axis=1)
    products = np.einsum("hd,nhd->hn", block.codes.astype(np.int64), key_codes)
    shift = block.exponents.astype(np.int64)[:, np.newaxis] + exponents.T - 6
    shifted = np.clip(shift_half_up(products, np.clip(shift, -24, 24)), -(2**23) + 1, 2**23 - 1)
    relative = shifted + block.addends[:, np.newaxis]
    none = np.zeros(spec.scored_heads if rule is Rule.WEIGHT_SUM else scope_sets(scope), np.int64)
    found = score_codes(relative, none, invalid, spec, scope)
    expected = model.score(query, 0.25, segments)
    assert np.array_equal(found, expected)
    assert np.unique(expected).size > 50


def scope_sets(scope):
    return 1 if scope is Scope.LAYER else 2


def test_wrong_query_blocks_are_refused():
    spec = KernelSpec(16, 2, 3)
    query = query_codes(spec)
    base = np.zeros(6, dtype=np.int64)
    packed = make_query_block(query, base, spec, Scope.LAYER).pack(spec)
    # A spare byte of the addends, of the exponents, and a padding channel's code.
    for place in ((0, 24), (1, 6), (3, 0)):
        expect(ErrorCode.RESERVED_NOT_ZERO, QueryBlock.unpack, bit_flipped(packed, place, 0), spec)
    with pytest.raises(ValueError, match="query block"):
        QueryBlock.unpack(packed[:-1], spec)
    with pytest.raises(ValueError, match="offsets"):
        make_query_block(query, base[:1], spec, Scope.LAYER)
    with pytest.raises(ValueError, match="int32"):
        make_query_block(query, base + 2**32, spec, Scope.LAYER)
    with pytest.raises(ValueError, match="do not fit"):
        make_query_block(query_codes(KernelSpec(16, 2, 2)), base, spec, Scope.LAYER)


# Status


def test_a_status_beat_has_its_known_bytes():
    spec = KernelSpec(64, 3, 3)
    status = StatusBeat(spec.digest()[:8], 0x01020304, 1000, ErrorCode.BUS)
    beat = status.pack()
    assert beat.shape == (1, 64)
    assert beat.tobytes() == (
        spec.digest()[:8] + bytes.fromhex("04030201e803000002000000") + bytes(44)
    )
    assert StatusBeat.unpack(beat) == status
    for byte in (0, 8, 12):
        assert StatusBeat.unpack(bit_flipped(beat, (0, byte), 0)) != status


def test_error_codes_are_the_contracts():
    assert {error.name: error.value for error in ErrorCode} == {
        "NONE": 0,
        "DESCRIPTOR": 1,
        "BUS": 2,
        "RESERVED_NOT_ZERO": 3,
    }


def test_wrong_status_beats_are_refused():
    beat = StatusBeat(bytes(8), 1, 2, ErrorCode.NONE).pack()
    for byte in (20, 63):
        expect(ErrorCode.RESERVED_NOT_ZERO, StatusBeat.unpack, bit_flipped(beat, (0, byte), 1))
    with pytest.raises(ValueError, match="4"):
        StatusBeat.unpack(bit_flipped(beat, (0, 16), 2))
    with pytest.raises(ValueError, match="7 bytes"):
        StatusBeat(bytes(7), 1, 2, ErrorCode.NONE)
    with pytest.raises(ValueError, match="launch_id=4294967296"):
        StatusBeat(bytes(8), 2**32, 2, ErrorCode.NONE)


# Tuples and score arrays


def test_tuples_hold_the_low_bits_of_positions():
    codes = np.array([15_361, 0, 65_535], dtype=np.uint16)
    assert make_tuples(codes, 70_000).tolist() == [
        15_361 << 16 | 4464,
        4465,
        65_535 << 16 | 4466,
    ]
    assert make_tuples(codes, 65_535)[:2].tolist() == [15_361 << 16 | 65_535, 0]
    assert make_tuples(codes, 0).dtype == np.uint32


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 65_535]), max_size=40), st.integers(0, 65_000))
def test_ranking_keys_sort_into_rank_order(codes, first):
    codes = np.array(codes, dtype=np.uint16)
    order = np.argsort(ranking_keys(make_tuples(codes, first)))[::-1]
    assert order.tolist() == sorted(range(codes.size), key=lambda i: (-int(codes[i]), i))


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 1024])
def test_score_array_round_trip(tokens):
    codes = np.random.default_rng(tokens).integers(0, 2**16, tokens).astype(np.uint16)
    tuples = make_tuples(codes, 2048)
    block = pack_score_array(tuples)
    assert block.shape == (-(-tokens // 16), 64)
    found = unpack_score_array(block, tokens)
    assert found.dtype == np.uint32
    assert np.array_equal(found, tuples)
    if tokens:
        twin = unpack_score_array(bit_flipped(block, (0, 2), 0), tokens)
        assert not np.array_equal(twin, tuples)
    if tokens % 16:
        expect(
            ErrorCode.RESERVED_NOT_ZERO,
            unpack_score_array,
            bit_flipped(block, (-1, 63), 0),
            tokens,
        )
    with pytest.raises(ValueError, match="score array"):
        unpack_score_array(block, tokens + 17)


def test_a_score_array_has_its_known_bytes():
    block = pack_score_array(make_tuples(np.array([0x0102, 0xFFFE], dtype=np.uint16), 0x1AAFF))
    assert block.tobytes().hex() == "ffaa0201" + "00abfeff" + "00" * 56


def test_blocks_end_at_a_window():
    codes = np.arange(2 * 65_540, dtype=np.int64).astype(np.uint16).reshape(2, -1)
    blocks = list(cut_blocks(codes, 65_530))
    assert [(b.kv_head, b.window, b.tuples.size) for b in blocks] == [
        (0, 0, 65_530),
        (1, 0, 65_530),
        (0, 0, 6),
        (1, 0, 6),
        (0, 65_536, 4),
        (1, 65_536, 4),
    ]
    assert blocks[4].positions.tolist() == [65_536, 65_537, 65_538, 65_539]
    assert blocks[4].codes.tolist() == codes[0, 65_536:].tolist()
