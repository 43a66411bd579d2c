# SPDX-License-Identifier: Apache-2.0
"""The oracle's bytes: shadow, launch blocks and tuples (contract page, sections 9 to 11).

Everything is written bit by bit into one large integer, at the address that the page gives.
"""

from functools import cache

BITS = {"fp16": 8, "int8": 8, "int4": 4, "int2": 2}
BEAT = 64


@cache
def padded_dim(d):
    while d % 16 or d < 64:
        d += 1
    return d


@cache
def group_beats(kv, d, mode):
    tile_tokens = 512 // (16 * BITS[mode])
    return kv + (64 // tile_tokens) * kv * (padded_dim(d) // 16)


def exponent_address(token, g, kv, d, mode):
    """Return (beat, byte) of a token's exponent; token counts from the start of the segment."""
    return (token // 64) * group_beats(kv, d, mode) + g, token % 64


def code_address(token, g, j, kv, d, mode):
    """Return (beat, bit) of a code."""
    tile_tokens = 512 // (16 * BITS[mode])
    slices = padded_dim(d) // 16
    group, place = divmod(token, 64)
    tile, i = divmod(place, tile_tokens)
    beat = group * group_beats(kv, d, mode) + kv + (tile * kv + g) * slices + j // 16
    return beat, BITS[mode] * (16 * i + j % 16)


def shadow(tokens, kv, d, mode, first_token=0):
    """Return the bytes from beat 0 to the end of the last tile that holds a token.

    tokens is a list of (exponents[kv], codes[kv][d]).
    """
    image, beats = 0, 0
    for index, (exponents, codes) in enumerate(tokens):
        token = first_token + index
        for g in range(kv):
            beat, byte = exponent_address(token, g, kv, d, mode)
            image |= exponents[g] << (8 * (BEAT * beat + byte))
            for j in range(d):
                beat, bit = code_address(token, g, j, kv, d, mode)
                image |= (codes[g][j] % 2 ** BITS[mode]) << (8 * BEAT * beat + bit)
            last, _ = code_address(token, g, padded_dim(d) - 1, kv, d, mode)
            beats = max(beats, last + 1)
    return image.to_bytes(BEAT * beats, "little")


def record(size, fields):
    """Return size little-endian bytes from (byte, width, value) fields; the rest is zero."""
    image = 0
    for byte, width, value in fields:
        image |= (value % 2 ** (8 * width)) << (8 * byte)
    return image.to_bytes(size, "little")


def padded(size):
    return size if size % BEAT == 0 else padded(size + 1)


def descriptor(shadow, query, score, base, tokens, row_stride, score_stride, statistics):
    return record(
        BEAT,
        [
            (0, 8, shadow),
            (8, 8, query),
            (16, 8, score),
            (24, 8, base),
            (32, 4, tokens),
            (36, 4, row_stride),
            (40, 4, score_stride),
            (48, 8, statistics),
        ],
    )


def statistics_block(stats, kv, d):
    wide = padded_dim(d)
    fields = []
    for (g, j), (c, mean) in stats.items():
        at = 4 * (g * wide + j)
        fields += [(at, 3, mean), (at + 3, 1, c)]
    return record(4 * kv * wide, fields)


def query_block(constants, exponents, codes, kv, d):
    """Return the query block; codes is [H][d], constants what each head's L' is moved by."""
    heads = len(codes)
    group = heads // kv
    second = padded(4 * heads)
    third = second + padded(heads)
    slices = padded_dim(d) // 16
    fields = [(4 * h, 4, constants[h]) for h in range(heads)]
    fields += [(second + h, 1, exponents[h]) for h in range(heads)]
    for h in range(heads):
        g, r = divmod(h, group)
        for j in range(d):
            at = ((g * slices + j // 16) * group + r) * 16 + j % 16
            fields.append((third + at, 1, codes[h][j]))
    return record(padded(third + 16 * heads * slices), fields)


def status_beat(digest, launch_id, complete, error):
    spec = int.from_bytes(digest[:8], "little")
    return record(BEAT, [(0, 8, spec), (8, 4, launch_id), (12, 4, complete), (16, 4, error)])


def score_tuple(code, position):
    return code * 65536 + position % 65536
