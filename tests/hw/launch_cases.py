# SPDX-License-Identifier: Apache-2.0
"""Launches that every execution must handle as golden does, for any spec and scope.

A case is a function of spec, scope (none for `make_shadow`) and the tokens of its larger segments.
"""

import zlib
from dataclasses import replace

import numpy as np
from golden_inputs import random_keys, random_query
from launch_builder import (
    Rows,
    ScoreSegment,
    ShadowSegment,
    as_stored,
    key_beats,
    key_value_extra_beats,
    score_launch,
    shadow_launch,
)

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.key_codes import KeyCodes, encode_keys
from hillinfer_model.launch import QueryBlock, make_query_block
from hillinfer_model.offsets import offsets
from hillinfer_model.query_codes import encode_query
from hillinfer_model.scores import aligned_products
from hillinfer_model.statistics import segment_statistics

ADDEND_LIMIT = 2**25 - 1
MEAN_LIMIT = 2**23 - 1
NAN, INFINITY, LARGEST = 0x7E00, 0x7C00, 0x7BFF
SIGN = 0x8000


def usual_tokens(spec):
    """Tokens of a case's larger segments: more than two groups, and not too slow to simulate."""
    return int(np.clip(200_000 // (spec.kv_heads * spec.padded_head_dim), 135, 500))


def generator_of(name):
    return np.random.default_rng(zlib.crc32(name.encode()))


# Parts


def coded(spec, scope, base, keys, query, extra_beats=0, statistics=None):
    """A segment as a host makes it from FP16 keys (tokens, kv, padded) and a float query."""
    shape = as_stored(spec)
    if statistics is None:
        statistics = segment_statistics(keys, 0, spec.segment_tokens, None)
    codes = encode_keys(keys, statistics, spec.key_mode)
    query_codes = encode_query(query, statistics, shape.head_dim**-0.5, shape)
    aligned = aligned_products(query_codes, codes, shape)
    references = offsets(aligned, codes.invalid, shape, scope)
    block = make_query_block(query_codes, references, shape, scope)
    if spec.key_mode is KeyMode.FP16:
        return ScoreSegment(base, Rows(keys, statistics, extra_beats), block)
    return ScoreSegment(base, codes, block)


def plausible(spec, scope, base, tokens, seed, extra_beats=0):
    """A segment of random keys with unlike channels, scored by a random query."""
    width = spec.padded_head_dim
    keys = random_keys(seed, tokens, spec.kv_heads, width)
    query = random_query(seed + 1, spec.query_heads, width) / 16
    return coded(spec, scope, base, keys, query, extra_beats)


def any_query(spec, generator, addend=ADDEND_LIMIT, low=-128, high=127):
    """A query block of any codes, exponents low..high and addends up to a magnitude."""
    heads = spec.scored_heads
    return QueryBlock(
        generator.integers(-addend, addend + 1, heads).astype(np.int32),
        generator.integers(low, high + 1, heads).astype(np.int8),
        generator.integers(-127, 128, (heads, spec.padded_head_dim)).astype(np.int8),
    )


def any_statistics(spec, generator):
    """Any exponents and means the contract allows, extremes often."""
    shape = (spec.kv_heads, spec.padded_head_dim)
    exponents = generator.integers(-14, 17, shape)
    means = np.trunc(generator.uniform(-1, 1, shape) * np.exp2(generator.integers(0, 24, shape)))
    extreme = generator.random(shape) < 0.1
    means = np.where(extreme, np.sign(means) * MEAN_LIMIT, means)
    return ChannelStatistics(exponents.astype(np.int8), means.astype(np.int32))


def any_codes(spec, generator, tokens, exponents=None):
    """Key codes anywhere in the key mode's range, with every kind of token exponent."""
    low, high = {8: (-127, 128), 4: (-7, 8), 2: (-2, 2)}[spec.key_mode.code_bits]
    shape = (tokens, spec.kv_heads, spec.padded_head_dim)
    if exponents is None:
        exponents = generator.integers(0, 256, shape[:2])
    return KeyCodes(
        generator.integers(low, high, shape).astype(np.int8),
        np.broadcast_to(exponents, shape[:2]).astype(np.uint8),
    )


def any_keys(spec, generator, tokens):
    """Keys that are anything: for shadows any codes, for rows any FP16 numbers, few not finite."""
    if spec.key_mode is not KeyMode.FP16:
        return any_codes(spec, generator, tokens)
    shape = (tokens, spec.kv_heads, spec.padded_head_dim)
    keys = generator.integers(0, INFINITY, shape) | SIGN * generator.integers(0, 2, shape)
    # One infinity or NaN makes a whole token invalid: in one token of 32.
    strange = np.flatnonzero(generator.random(tokens) < 1 / 32)
    row = spec.kv_heads * spec.padded_head_dim
    channels = generator.integers(0, row, strange.size)
    keys.reshape(tokens, row)[strange, channels] |= INFINITY
    return Rows(keys.astype(np.uint16), any_statistics(spec, generator))


def extreme_keys(spec, generator, tokens):
    """Keys whose codes are all of the largest magnitude."""
    shape = (tokens, spec.kv_heads, spec.padded_head_dim)
    negative = generator.integers(0, 2, shape)
    # Whole tokens of one sign give the largest sums.
    negative = np.where(generator.random(shape[:1]) < 0.5, 0, 1)[:, None, None] | (
        negative * (generator.random(shape[:1]) < 0.3)[:, None, None]
    )
    if spec.key_mode is KeyMode.FP16:
        exponents = np.full(shape[1:], -14, dtype=np.int8)
        statistics = ChannelStatistics(exponents, np.zeros(shape[1:], dtype=np.int32))
        return Rows((LARGEST | SIGN * negative).astype(np.uint16), statistics)
    low, high = {8: (-127, 127), 4: (-7, 7), 2: (-2, 1)}[spec.key_mode.code_bits]
    return KeyCodes(
        np.where(negative == 1, low, high).astype(np.int8),
        generator.integers(0, 255, shape[:2]).astype(np.uint8),
    )


def extreme_query(spec, generator, exponent, addend):
    """A query of the largest codes, one sign per head, so that sums are as large as they get."""
    heads = spec.scored_heads
    signs = generator.choice([-1, 1], heads)
    codes = np.broadcast_to(127 * signs[:, None], (heads, spec.padded_head_dim))
    return QueryBlock(
        np.asarray(addend * np.ones(heads), dtype=np.int32),
        np.full(heads, exponent, dtype=np.int8),
        codes.astype(np.int8),
    )


def every_code(spec):
    """FP16 keys that hold all 65,536 codes; the NaNs fill as few tokens as they can."""
    codes = np.arange(65_536, dtype=np.uint16)
    is_nan = codes & ~np.uint16(SIGN) > INFINITY
    codes = np.concatenate([codes[~is_nan], codes[is_nan]])
    values = spec.kv_heads * spec.padded_head_dim
    tokens = -(-codes.size // values)
    return np.resize(codes, tokens * values).reshape(tokens, spec.kv_heads, spec.padded_head_dim)


def segments_of(spec, keys):
    """Keys cut into what a segment may hold, so that none is left out."""
    for start in range(0, keys.shape[0], spec.segment_tokens):
        yield keys[start : start + spec.segment_tokens]


def base_of(spec, index):
    return index * spec.segment_tokens


# Cases of score_tokens


def random_launch(spec, scope, tokens, seed=1, extra_beats=0):
    """Plausible segments of the given numbers of tokens, at consecutive base positions."""
    segments = [
        plausible(spec, scope, base_of(spec, i), count, seed + 2 * i, extra_beats)
        for i, count in enumerate(tokens)
    ]
    return score_launch(spec, scope, segments, seed)


def _random(spec, scope, tokens):
    return random_launch(spec, scope, [tokens, 17, 64, tokens // 2 + 1])


def _every_code(spec, scope, tokens):
    generator = generator_of("every code")
    segments = []
    for keys in [*segments_of(spec, every_code(spec))] * 2:
        statistics = any_statistics(spec, generator)
        query = any_query(spec, generator, 2**14, -30, 10)
        own = Rows(keys, statistics)
        if spec.key_mode is not KeyMode.FP16:
            own = encode_keys(keys, statistics, spec.key_mode)
        segments.append(ScoreSegment(base_of(spec, len(segments)), own, query))
    return score_launch(spec, scope, segments)


def _anything(spec, scope, tokens):
    generator = generator_of("anything")
    segments = [
        ScoreSegment(
            base_of(spec, i), any_keys(spec, generator, count), any_query(spec, generator, *limits)
        )
        for i, (count, limits) in enumerate(
            [(tokens, ()), (tokens // 2, (2**12, -40, 0)), (tokens // 2, (2**12, -25, -5))]
        )
    ]
    return score_launch(spec, scope, segments)


def _saturated_products(spec, scope, tokens):
    generator = generator_of("products")
    segments = [
        ScoreSegment(
            base_of(spec, i),
            extreme_keys(spec, generator, tokens // 2),
            extreme_query(spec, generator, exponent, addend),
        )
        for i, (exponent, addend) in enumerate([(127, 0), (-9, 100), (-10, -(2**23))])
    ]
    segments.append(products_at_the_limit(spec, base_of(spec, len(segments))))
    return score_launch(spec, scope, segments)


def products_at_the_limit(spec, base):
    """Inner products -1 and 1 that their shift takes to -2^23 and 2^23, one beyond the limit.

    24 bits hold -2^23, so nothing but the contract says that it is limited. The addend makes the
    logarithm 1 of what would be 0 otherwise.
    """
    shape = (2, spec.kv_heads, spec.padded_head_dim)
    if spec.key_mode is KeyMode.FP16:
        # The smallest number is 1 in units of 2^(c - 14).
        codes = np.zeros(shape, dtype=np.uint16)
        codes[:, :, 0] = np.array([[1], [1 | SIGN]])
        exponents = np.full(shape[1:], -10, dtype=np.int8)
        keys = Rows(codes, ChannelStatistics(exponents, np.zeros(shape[1:], dtype=np.int32)))
    else:
        codes = np.zeros(shape, dtype=np.int8)
        codes[:, :, 0] = np.array([[0 if spec.key_mode is KeyMode.INT2 else 1], [-1]])
        keys = KeyCodes(codes, np.zeros(shape[:2], dtype=np.uint8))
    query = np.zeros((spec.scored_heads, spec.padded_head_dim), dtype=np.int8)
    query[:, 0] = -1
    shift = np.full(spec.scored_heads, 23 + 6, dtype=np.int8)
    return ScoreSegment(base, keys, QueryBlock(addend_row(spec, 2**23), shift, query))


def _addends(spec, scope, tokens):
    """Addends at the ends of what a host can send, and weights at the end of 48 bits."""
    generator = generator_of("addends")
    addends = [ADDEND_LIMIT, -ADDEND_LIMIT, 24 * 256 - 1, 24 * 256, 23 * 256, -16 * 256, -24 * 256]
    segments = [
        ScoreSegment(
            base_of(spec, i),
            any_keys(spec, generator, 33),
            replace(any_query(spec, generator, 0, -30, -16), addends=addend_row(spec, addend)),
        )
        for i, addend in enumerate(addends)
    ]
    if spec.rule is Rule.RAW_SUM and scope is Scope.LAYER:
        # Head 0 carries the A of all heads.
        for i, sign in enumerate((-1, 1)):
            query = any_query(spec, generator, MEAN_LIMIT)
            query.addends[0] = sign * (MEAN_LIMIT + spec.kv_heads * (2**24 - 1))
            keys = any_keys(spec, generator, 33)
            segments.append(ScoreSegment(base_of(spec, 10 + i), keys, query))
    return score_launch(spec, scope, segments)


def addend_row(spec, addend):
    return np.full(spec.scored_heads, addend, dtype=np.int32)


def _steps_of_weight(spec, scope, tokens):
    """Log weights all over the range where weights are neither 0 nor saturated."""
    generator = generator_of("weights")
    segments = []
    for index in range(4):
        query = any_query(spec, generator, 0, -17, -13)
        spread = generator.integers(-20 * 256, 26 * 256, spec.scored_heads)
        if index == 3:
            # All heads about where weights saturate: one that does would hide the others.
            spread = addend_row(spec, 24 * 256)
        query = replace(query, addends=spread.astype(np.int32))
        keys = any_keys(spec, generator, tokens // 2)
        if isinstance(keys, KeyCodes):
            keys = KeyCodes(keys.codes, (keys.exponents % 12).astype(np.uint8))
        segments.append(ScoreSegment(base_of(spec, index), keys, query))
    return score_launch(spec, scope, segments)


def _invalid(spec, scope, tokens):
    generator = generator_of("invalid")
    segments = []
    for index, share in enumerate((0.02, 0.6, 1.0)):
        segment = plausible(spec, scope, base_of(spec, index), tokens // 2, 40 + index)
        marks = generator.random((segment.tokens, spec.kv_heads)) < share
        segments.append(replace(segment, keys=with_invalid(segment.keys, marks, generator)))
    return score_launch(spec, scope, segments)


def with_invalid(keys, marks, generator):
    """Mark (token, KV head) pairs invalid: by exponents, or by one NaN in a row."""
    if isinstance(keys, KeyCodes):
        exponents = np.where(marks, 255, keys.exponents).astype(np.uint8)
        return KeyCodes(np.where(marks[:, :, None], 0, keys.codes).astype(np.int8), exponents)
    values = keys.keys.copy()
    for token, head in np.argwhere(marks):
        channel = generator.integers(0, values.shape[2])
        values[token, head, channel] = generator.choice([NAN, 0x7C01, 0xFC01, 0xFFFF])
    values[~marks[:, 0], 0, 0] = INFINITY
    return replace(keys, keys=values)


def _ties(spec, scope, tokens):
    keys = random_keys(7, 2, spec.kv_heads, spec.padded_head_dim)
    query = random_query(8, spec.query_heads, spec.padded_head_dim) / 16
    order = generator_of("ties").integers(0, 2, (2, tokens // 2))
    segments = [
        coded(spec, scope, base_of(spec, i), keys[own], query) for i, own in enumerate(order)
    ]
    return score_launch(spec, scope, segments)


def _shifts(spec, scope, tokens):
    """Every s_h in turn against every t."""
    generator = generator_of("shifts")
    segments = []
    heads = np.arange(spec.scored_heads)
    for index, start in enumerate((-128, -64, -24, 0, 96)):
        exponents = np.clip(start + 7 * heads % 61, -128, 127).astype(np.int8)
        query = replace(any_query(spec, generator, 2**11), exponents=exponents)
        keys = any_keys(spec, generator, tokens // 3)
        if isinstance(keys, KeyCodes):
            first = 51 * index
            row = (first + np.arange(keys.codes.shape[0])) % 256
            keys = KeyCodes(keys.codes, np.repeat(row[:, None], spec.kv_heads, 1).astype(np.uint8))
        segments.append(ScoreSegment(base_of(spec, index), keys, query))
    return score_launch(spec, scope, segments)


def _empty_segments(spec, scope, tokens):
    return random_launch(spec, scope, [0, 20, 0, 0, 65, 0], seed=3)


def _only_empty_segments(spec, scope, tokens):
    return random_launch(spec, scope, [0, 0, 0], seed=4)


def _no_segments(spec, scope, tokens):
    return score_launch(spec, scope, [])


def _one_token(spec, scope, tokens):
    return random_launch(spec, scope, [1], seed=5)


def _odd_counts(spec, scope, tokens):
    return random_launch(spec, scope, [1, 15, 16, 17, 63, 64, 65, 3, 127, 128, 129], seed=6)


def _sequences(spec, scope, tokens):
    """Several sequences: base positions repeat and go back."""
    bases = [0, 1, 0, 5, 4, 0, 1, 2]
    counts = [40, 7, 16, 64, 1, 33, 80, 5]
    segments = [
        plausible(spec, scope, base_of(spec, base), count, 60 + i)
        for i, (base, count) in enumerate(zip(bases, counts, strict=True))
    ]
    return score_launch(spec, scope, segments)


def _far_positions(spec, scope, tokens):
    step = spec.segment_tokens
    bases = [65_536 - step, 65_536, 65_536 + step, 2**32 - step, 2**32, 2**63, 2**64 - step]
    segments = [plausible(spec, scope, base, 35, 80 + i) for i, base in enumerate(bases)]
    return score_launch(spec, scope, segments)


def _full_segment(spec, scope, tokens):
    return random_launch(spec, scope, [spec.segment_tokens, 5], seed=9)


def _layouts(spec, scope, tokens):
    """Rows as a key-only plane, as K‖V and further apart; shadows and queries that are shared."""
    if spec.key_mode is KeyMode.FP16:
        extras = [0, key_value_extra_beats(spec), 1, 3 * key_beats(spec), 0]
        segments = [
            plausible(spec, scope, base_of(spec, i), 45 + i, 90 + i, extra)
            for i, extra in enumerate(extras)
        ]
        return score_launch(spec, scope, segments)
    first = plausible(spec, scope, 0, 70, 90)
    second = plausible(spec, scope, base_of(spec, 1), 41, 92)
    shared = [replace(second, keys=first.keys), replace(first, query=second.query)]
    return score_launch(spec, scope, [first, second, *shared])


# What makes a descriptor wrong: byte, struct width and value, or a function of spec and scope.
WRONG_FIELDS = {
    "reserved_44": (44, 4, 1),
    "reserved_47": (47, 1, 0x80),
    "reserved_56": (56, 8, 1),
    "reserved_63": (63, 1, 0x80),
    "base_position": (24, 8, 16),
    "far_base_position": (24, 8, 2**63 + 1),
    "tokens": (32, 4, None),
    "all_tokens": (32, 4, 2**32 - 1),
    "row_stride": (36, 4, None),
    "score_stride": (40, 4, None),
    "statistics": (48, 8, None),
}


def wrong_value(name, spec, scope):
    """The value that makes a field wrong where that depends on the launch; None: it cannot be."""
    if name == "tokens":
        return spec.segment_tokens + 1
    if name == "row_stride":
        return key_beats(spec) - 1 if spec.key_mode is KeyMode.FP16 or scope is None else 1
    if name == "score_stride":
        # One less than the beats of the 40 tokens that `_wrong` gives each segment.
        return 2 if scope is Scope.KV_HEAD else 1
    return None if spec.key_mode is KeyMode.FP16 or scope is None else 1


def spoil(launch, index, names, spec, scope):
    """Make fields of a launch's descriptor wrong."""
    segments = launch.segments.copy()
    for name in names:
        byte, width, value = WRONG_FIELDS[name]
        value = wrong_value(name, spec, scope) if value is None else value
        if value is not None:
            own = np.frombuffer(value.to_bytes(width, "little"), dtype=np.uint8)
            segments[index, byte : byte + width] = own
    return replace(launch, segments=segments)


def _wrong(index, *names):
    def case(spec, scope, tokens):
        launch = random_launch(spec, scope, [40, 40, 40, 40], seed=12)
        return spoil(launch, index, names, spec, scope)

    return case


def _wrong_scope(spec, scope, tokens):
    return replace(random_launch(spec, scope, [40, 20], seed=13), scope=2 + tokens)


def _wrong_after_empty(spec, scope, tokens):
    launch = random_launch(spec, scope, [0, 0, 40], seed=14)
    return spoil(launch, 1, ["base_position"], spec, scope)


SCORE_CASES = {
    "random": _random,
    "every_code": _every_code,
    "anything": _anything,
    "saturated_products": _saturated_products,
    "addends": _addends,
    "steps_of_weight": _steps_of_weight,
    "invalid": _invalid,
    "ties": _ties,
    "shifts": _shifts,
    "empty_segments": _empty_segments,
    "only_empty_segments": _only_empty_segments,
    "no_segments": _no_segments,
    "one_token": _one_token,
    "odd_counts": _odd_counts,
    "sequences": _sequences,
    "far_positions": _far_positions,
    "full_segment": _full_segment,
    "layouts": _layouts,
    **{f"wrong_{name}": _wrong(i % 4, name) for i, name in enumerate(WRONG_FIELDS)},
    "wrong_and_reserved": _wrong(1, "tokens", "reserved_44"),
    "wrong_scope": _wrong_scope,
    "wrong_after_empty": _wrong_after_empty,
}


# Cases of make_shadow


def some_rows(spec, tokens, seed, extra_beats=0):
    """Random keys with unlike channels, by rows."""
    keys = random_keys(seed, tokens, spec.kv_heads, spec.padded_head_dim)
    return Rows(keys, segment_statistics(keys, 0, spec.segment_tokens, None), extra_beats)


def random_shadow_launch(spec, tokens, seed=1, extra_beats=0):
    """Segments of the given numbers of tokens, at consecutive base positions."""
    segments = [
        ShadowSegment(base_of(spec, i), some_rows(spec, count, seed + i, extra_beats))
        for i, count in enumerate(tokens)
    ]
    return shadow_launch(spec, segments, seed)


def _shadow_random(spec, tokens):
    return random_shadow_launch(spec, [tokens, 17, 64, tokens // 2 + 1])


def _shadow_every_code(spec, tokens):
    generator = generator_of("every code of a row")
    return shadow_launch(
        spec,
        [
            ShadowSegment(base_of(spec, 3 * i), Rows(keys, any_statistics(spec, generator)))
            for i, keys in enumerate([*segments_of(spec, every_code(spec))] * 2)
        ],
    )


def _shadow_extremes(spec, tokens):
    """Centred keys of the largest magnitude, keys equal to the mean, and numbers of one bit."""
    generator = generator_of("extreme rows")
    shape = (tokens // 2, spec.kv_heads, spec.padded_head_dim)
    signs = SIGN * generator.integers(0, 2, shape)
    largest = (LARGEST | signs).astype(np.uint16)
    zeros = signs.astype(np.uint16)
    single_bits = ((np.uint16(1) << generator.integers(0, 15, shape)) | signs).astype(np.uint16)
    is_nan = single_bits & ~np.uint16(SIGN) > INFINITY
    single_bits[is_nan] = LARGEST
    segments = []
    for index, keys in enumerate((largest, zeros, single_bits)):
        for c, mean in ((-14, MEAN_LIMIT), (-14, -MEAN_LIMIT), (16, 0), (4, 1)):
            statistics = ChannelStatistics(
                np.full(shape[1:], c, dtype=np.int8), np.full(shape[1:], mean, dtype=np.int32)
            )
            segments.append(ShadowSegment(base_of(spec, index), Rows(keys[:66], statistics)))
    return shadow_launch(spec, segments)


def _shadow_invalid(spec, tokens):
    generator = generator_of("invalid rows")
    segments = []
    for index, share in enumerate((0.02, 0.6, 1.0)):
        rows = some_rows(spec, tokens // 2, 140 + index)
        marks = generator.random((rows.tokens, spec.kv_heads)) < share
        segments.append(ShadowSegment(base_of(spec, index), with_invalid(rows, marks, generator)))
    return shadow_launch(spec, segments)


def _shadow_layouts(spec, tokens):
    extras = [0, key_value_extra_beats(spec), 1, 3 * key_beats(spec), 0]
    segments = [
        ShadowSegment(base_of(spec, i), some_rows(spec, 62 + i, 150 + i, extra))
        for i, extra in enumerate(extras)
    ]
    return shadow_launch(spec, segments)


def _shadow_wrong(index, name):
    def case(spec, tokens):
        launch = random_shadow_launch(spec, [40, 40, 40, 40], seed=112)
        if name == "score":
            segments = launch.segments.copy()
            segments[index, 16] = 1
            return replace(launch, segments=segments)
        return spoil(launch, index, [name], spec, None)

    return case


SHADOW_CASES = {
    "random": _shadow_random,
    "every_code": _shadow_every_code,
    "extremes": _shadow_extremes,
    "invalid": _shadow_invalid,
    "empty_segments": lambda spec, tokens: random_shadow_launch(spec, [0, 20, 0, 0, 65, 0], 103),
    "only_empty_segments": lambda spec, tokens: random_shadow_launch(spec, [0, 0], 104),
    "no_segments": lambda spec, tokens: shadow_launch(spec, []),
    "one_token": lambda spec, tokens: random_shadow_launch(spec, [1], 105),
    "odd_counts": lambda spec, tokens: random_shadow_launch(
        spec, [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 129], 106
    ),
    "full_segment": lambda spec, tokens: random_shadow_launch(spec, [spec.segment_tokens, 5], 109),
    "layouts": _shadow_layouts,
    **{
        f"wrong_{name}": _shadow_wrong(i % 4, name)
        for i, name in enumerate(["score", *(n for n in WRONG_FIELDS if n != "statistics")])
    },
}
