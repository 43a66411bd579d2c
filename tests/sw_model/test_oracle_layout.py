# SPDX-License-Identifier: Apache-2.0
"""The golden model's shadow, launch blocks and tuples against the oracle, byte by byte."""

from functools import cache

import numpy as np
import oracle_layout
import oracle_scores
import pytest
from oracle_arrays import flipped, from_statistics, to_statistics
from pairwise import pairwise

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.launch_error import ErrorCode
from hillinfer_model.layout import read_codes, write_codes
from hillinfer_model.query_block import QueryBlock, make_query_block
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.score_tuples import (
    cut_blocks,
    make_tuples,
    pack_score_array,
    ranking_keys,
    unpack_score_array,
)
from hillinfer_model.statistics_block import pack_statistics, unpack_statistics
from hillinfer_model.status_beat import StatusBeat

SHADOW_MODES = [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2]
CODE_RANGE = {KeyMode.INT8: (-127, 127), KeyMode.INT4: (-7, 7), KeyMode.INT2: (-2, 1)}
SHAPES = [(1, 64), (2, 64), (3, 80), (1, 256), (5, 96), (2, 3), (1, 65)]


def random_codes(seed, tokens, kv, d, mode):
    generator = np.random.default_rng(seed)
    low, high = CODE_RANGE[mode]
    codes = generator.integers(low, high + 1, (tokens, kv, d)).astype(np.int8)
    exponents = generator.integers(1, 256, (tokens, kv)).astype(np.uint8)
    codes[exponents == 255] = 0
    return KeyCodes(codes, exponents)


def empty_shadow(spec):
    return np.zeros((spec.segment_beats, 64), dtype=np.uint8)


def expected_shadow(codes, kv, d, mode, first=0):
    tokens = list(zip(codes.exponents.tolist(), codes.codes.tolist(), strict=True))
    return oracle_layout.shadow(tokens, kv, d, mode.value, first)


def shadow_is(shadow, image):
    """Say whether a shadow starts with these bytes and is zero behind them."""
    return shadow.tobytes() == image.ljust(shadow.nbytes, b"\0")


@pytest.mark.parametrize(
    ("shape", "tokens", "mode"), pairwise([SHAPES, [1, 4, 5, 17, 64, 65, 150], SHADOW_MODES])
)
def test_shadow_bytes(shape, tokens, mode):
    kv, d = shape
    spec = KernelSpec(d, kv, 1, key_mode=mode, segment_tokens=512)
    codes = random_codes(tokens, tokens, kv, d, mode)
    shadow = empty_shadow(spec)
    write_codes(shadow, 0, codes, spec)
    image = expected_shadow(codes, kv, d, mode)
    assert shadow_is(shadow, image)
    assert not shadow_is(flipped(shadow), image)
    if d > 1:
        wrong = KeyCodes(flipped(codes.codes, d - 1), codes.exponents)
        assert not shadow_is(shadow, expected_shadow(wrong, kv, d, mode))
    wrong = KeyCodes(codes.codes, flipped(codes.exponents, tokens * kv - 1, 7))
    assert not shadow_is(shadow, expected_shadow(wrong, kv, d, mode))


@pytest.mark.parametrize("mode", SHADOW_MODES)
def test_shadow_is_the_same_in_pieces(mode):
    kv, d = 2, 80
    spec = KernelSpec(d, kv, 1, key_mode=mode, segment_tokens=512)
    codes = random_codes(3, 200, kv, d, mode)
    shadow = empty_shadow(spec)
    for first, last in ((0, 64), (128, 200), (64, 128)):
        write_codes(shadow, first, KeyCodes(codes.codes[first:last], codes.exponents[first:last]),
                    spec)  # fmt: skip
    assert shadow_is(shadow, expected_shadow(codes, kv, d, mode))


@cache
def whole_segment(kv, d, mode):
    """Codes of a segment, and what the oracle writes of them, which takes most of a second."""
    codes = random_codes(4, 512, kv, d, mode)
    return codes, expected_shadow(codes, kv, d, mode)


@pytest.mark.parametrize("mode", SHADOW_MODES)
@pytest.mark.parametrize(("first", "tokens"), [(0, 512), (0, 1), (64, 64), (3, 70), (511, 1)])
def test_golden_reads_what_the_oracle_wrote(mode, first, tokens):
    kv, d = 2, 66
    spec = KernelSpec(d, kv, 1, key_mode=mode, segment_tokens=512)
    codes, image = whole_segment(kv, d, mode)
    assert len(image) == spec.segment_bytes
    shadow = np.frombuffer(image, dtype=np.uint8).reshape(-1, 64).copy()
    found = read_codes(shadow, first, tokens, spec)
    assert np.array_equal(found.codes, codes.codes[first : first + tokens])
    assert np.array_equal(found.exponents, codes.exponents[first : first + tokens])
    beat, bit = oracle_layout.code_address(first, 1, 65, kv, d, mode.value)
    wrong = flipped(shadow, 64 * beat + bit // 8, bit % 8)
    assert not np.array_equal(read_codes(wrong, first, tokens, spec).codes, found.codes)


@pytest.mark.parametrize("mode", SHADOW_MODES)
@pytest.mark.parametrize(("kv", "d"), SHAPES)
def test_sizes(mode, kv, d):
    spec = KernelSpec(d, kv, 1, key_mode=mode)
    wide = oracle_layout.padded_dim(d)
    assert spec.group_beats == oracle_layout.group_beats(kv, d, mode.value)
    assert spec.group_beats == kv * (1 + wide * oracle_layout.BITS[mode.value] // 8)
    assert spec.segment_bytes == 16 * spec.group_beats * 64
    assert 64 * spec.group_beats * 64 % 4096 == 0
    assert spec.group_beats != oracle_layout.group_beats(kv + 1, d, mode.value)


# Launch blocks

DESCRIPTORS = [
    (1, 2, 3, 4096, 1024, 0, 0, 0),
    (2**64 - 1, 2**63, 2**40 + 5, 2**33, 2**32 - 1, 7, 64, 2**50 + 1),
    (0, 0, 0, 0, 1, 2**32 - 1, 2**32 - 1, 2**64 - 1),
]


@pytest.mark.parametrize("values", DESCRIPTORS)
def test_descriptor_bytes(values):
    beat = Descriptor(*values).pack()
    expected = oracle_layout.descriptor(*values)
    assert beat.tobytes() == expected
    assert beat.shape == (1, 64)
    assert Descriptor.unpack(np.frombuffer(expected, np.uint8).reshape(1, 64)) == Descriptor(
        *values
    )
    assert flipped(beat, 47).tobytes() != expected
    assert Descriptor.unpack(flipped(beat, 8)) != Descriptor(*values)


STATISTICS = {
    (1, 64): lambda j: ((j % 31) - 14, (-1) ** j * (2**23 - 1 - j)),
    (2, 80): lambda j: (16 - j % 31, -(2**23 - 1) + j),
    (3, 5): lambda j: (-1, -1 - j),
}


@pytest.mark.parametrize(("kv", "d"), list(STATISTICS))
def test_statistics_block_bytes(kv, d):
    spec = KernelSpec(d, kv, 1, key_mode=KeyMode.FP16)
    table = {(g, j): STATISTICS[kv, d](g * d + j) for g in range(kv) for j in range(d)}
    expected = oracle_layout.statistics_block(table, kv, d)
    block = pack_statistics(to_statistics(table, kv, d), spec)
    assert block.tobytes() == expected
    assert block.shape == (len(expected) // 64, 64)
    assert from_statistics(unpack_statistics(block, spec)) == table
    assert from_statistics(unpack_statistics(flipped(block, 3, 0), spec)) != table
    other = {**table, (kv - 1, d - 1): (0, 12345)}
    assert pack_statistics(to_statistics(other, kv, d), spec).tobytes() != expected


def query_codes_of(seed, heads, d):
    generator = np.random.default_rng(seed)
    return QueryCodes(
        generator.integers(-127, 128, (heads, d)).astype(np.int8),
        generator.integers(-128, 128, heads).astype(np.int8),
        generator.integers(-(2**23) + 1, 2**23, heads).astype(np.int32),
    )


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(
    ("kv", "group", "d"), [(1, 1, 64), (3, 3, 64), (2, 7, 80), (8, 4, 128), (1, 17, 3), (17, 1, 65)]
)
def test_query_block_bytes(scope, rule, kv, group, d):
    spec = KernelSpec(d, kv, group, rule=rule)
    heads = kv * group if rule is Rule.WEIGHT_SUM else kv
    query = query_codes_of(kv, heads, d)
    sets = oracle_scores.heads_of(rule.value, scope.value, kv, group)
    if rule is Rule.WEIGHT_SUM:
        given = [(-1) ** h * (2**24 + h) for h in range(heads)]
        moved = given
    else:
        given = [(-1) ** i * (2**24 - 9 * i) for i in range(len(sets))]
        moved = [0] * heads
        for (owned, _), a in zip(sets, given, strict=True):
            moved[owned[0]] += a
    constants = [int(o) - m for o, m in zip(query.corrections, moved, strict=True)]
    expected = oracle_layout.query_block(
        constants, query.exponents.tolist(), query.codes.tolist(), kv, d
    )
    made = make_query_block(query, np.array(given, dtype=np.int64), spec, scope)
    block = made.pack(spec)
    assert block.tobytes() == expected
    assert block.shape == (len(expected) // 64, 64)
    read = QueryBlock.unpack(np.frombuffer(expected, np.uint8).reshape(-1, 64), spec)
    assert read.addends.tolist() == constants
    assert np.array_equal(read.exponents, query.exponents)
    assert np.array_equal(read.codes, query.codes)
    wrong = QueryBlock(made.addends, made.exponents, flipped(made.codes, d - 1))
    assert wrong.pack(spec).tobytes() != expected
    wrong = QueryBlock(made.addends, flipped(made.exponents, heads - 1), made.codes)
    assert wrong.pack(spec).tobytes() != expected
    wrong = make_query_block(query, np.array(given, dtype=np.int64) + 1, spec, scope)
    assert wrong.pack(spec).tobytes() != expected


@pytest.mark.parametrize(("error", "number"), [("NONE", 0), ("DESCRIPTOR", 1), ("BUS", 2),
                                               ("RESERVED_NOT_ZERO", 3)])  # fmt: skip
def test_status_beat_bytes(error, number):
    digest = KernelSpec(64, 3, 3).digest()
    beat = StatusBeat(digest[:8], 2**32 - 2, 1023, ErrorCode[error])
    expected = oracle_layout.status_beat(digest, 2**32 - 2, 1023, number)
    assert beat.pack().tobytes() == expected
    assert StatusBeat.unpack(np.frombuffer(expected, np.uint8).reshape(1, 64)) == beat
    assert StatusBeat.unpack(flipped(beat.pack(), 12)) != beat
    other = KernelSpec(64, 3, 3, segment_tokens=512).digest()
    assert oracle_layout.status_beat(other, 2**32 - 2, 1023, number) != expected


# Tuples


@pytest.mark.parametrize("first", [0, 1024, 65536 - 1024, 65536, 70_656, 2**33])
def test_tuples(first):
    codes = np.array([0, 1, 15361, 65535, 32768], dtype=np.uint16)
    found = make_tuples(codes, first)
    expected = [oracle_layout.score_tuple(c, first + i) for i, c in enumerate(codes.tolist())]
    assert found.dtype == np.uint32
    assert found.tolist() == expected
    assert make_tuples(flipped(codes, 2, 3), first).tolist() != expected
    assert make_tuples(codes, first + 1).tolist() != expected


def test_ranking_keys_put_ties_in_order():
    codes = np.array([5, 9, 0, 9, 9, 0, 5], dtype=np.uint16)
    keys = ranking_keys(make_tuples(codes, 65536 + 64)).tolist()
    ranked = sorted(range(len(codes)), key=lambda i: -keys[i])
    assert ranked == [1, 3, 4, 0, 6, 2, 5]
    assert keys == [t ^ 0xFFFF for t in make_tuples(codes, 65536 + 64).tolist()]
    assert sorted(range(len(codes)), key=lambda i: -make_tuples(codes, 64).tolist()[i]) != ranked


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64])
def test_score_array_bytes(tokens):
    tuples = make_tuples(np.arange(1, tokens + 1, dtype=np.uint16), 65536)
    expected = oracle_layout.record(
        oracle_layout.padded(4 * tokens), [(4 * i, 4, t) for i, t in enumerate(tuples.tolist())]
    )
    block = pack_score_array(tuples)
    assert block.tobytes() == expected
    assert np.array_equal(unpack_score_array(block, tokens), tuples)
    assert not np.array_equal(unpack_score_array(flipped(block), tokens), tuples)


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("tokens", [1, 15, 16, 40])
def test_blocks_hold_every_token_once_in_position_order(kv, tokens):
    codes = np.random.default_rng(kv).integers(0, 65536, (kv, tokens)).astype(np.uint16)
    for g in range(kv):
        blocks = [block for block in cut_blocks(codes, 16) if block.kv_head == g]
        tuples = [t for block in blocks for t in block.tuples.tolist()]
        expected = [oracle_layout.score_tuple(c, p) for p, c in enumerate(codes[g].tolist())]
        assert tuples == expected
        assert [len(block.tuples) for block in blocks[:-1]] == [16] * (len(blocks) - 1)
        assert all(block.window == 0 for block in blocks)
        assert tuples != [t ^ 1 for t in expected]
