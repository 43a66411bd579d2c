# SPDX-License-Identifier: Apache-2.0
"""L' of every token of a sequence, a bounded piece at a time, in torch (contract, section 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from twins.key_path import (
    CODING_BYTES_PER_CHANNEL,
    INVALID_EXPONENT,
    STATISTICS_BYTES_PER_CHANNEL,
    TwinLayout,
)
from twins.query_path import QUERY_BYTES_PER_CHANNEL, QueryCodes, code_query

_MIB = 1 << 20


@dataclass(frozen=True)
class Pieces:
    """How many bytes one piece of the work takes at most.

    Parameters
    ----------
    coding, queries, products, final
        Where keys and queries are coded, products and score codes made.
    """

    coding: int = 3 * _MIB // 2
    queries: int = _MIB // 4
    # Enough to hide most of what a torch call costs.
    products: int = 3 * _MIB
    final: int = 3 * _MIB // 2

    def coding_tokens(self, spec: KernelSpec) -> int:
        """Return how many tokens' keys are coded at once: a multiple of a group, at least one."""
        return _tokens_within(self.coding, _coding_bytes(spec))

    def product_tokens(self, spec: KernelSpec) -> int:
        """Return how many tokens have products made at once: whole groups, at least one."""
        return _tokens_within(self.products, _key_bytes(spec) + _product_bytes(spec))

    def segments_coded_at_once(self, spec: KernelSpec) -> int:
        """Return for how many segments the queries are coded at once, at least one."""
        return max(self.queries // _query_bytes(spec), 1)

    def final_tokens(self, spec: KernelSpec, sets: int) -> int:
        """Return how many tokens' score codes are made at once for so many selected sets."""
        return _tokens_within(self.final, _final_bytes(spec, sets))


USUAL = Pieces()


def _tokens_within(limit: int, bytes_per_token: int) -> int:
    return max(limit // bytes_per_token // GROUP_TOKENS, 1) * GROUP_TOKENS


def _coding_bytes(spec: KernelSpec) -> int:
    per_channel = max(CODING_BYTES_PER_CHANNEL, STATISTICS_BYTES_PER_CHANNEL)
    # Exponents on the way, and where in its tile a token lies.
    return spec.kv_heads * (spec.padded_head_dim * per_channel + 16) + 6 * 8


def _key_bytes(spec: KernelSpec) -> int:
    # Codes as stored; those of one place in every byte with a byte each, and as float32.
    packed = spec.kv_heads * spec.padded_head_dim * spec.key_mode.code_bits // 8
    return packed * (1 + 1 + 4)


def _product_bytes(spec: KernelSpec) -> int:
    # Products, a copy of them, their scales; exponents as int32.
    return spec.scored_heads * (4 + 4 + 4) + spec.kv_heads * 8


def _query_bytes(spec: KernelSpec) -> int:
    return spec.scored_heads * spec.padded_head_dim * QUERY_BYTES_PER_CHANNEL


def _final_bytes(spec: KernelSpec, sets: int) -> int:
    # Z, w in its place, a float64 of it; sums, their bits and magnitudes, a mask; tuples.
    return spec.scored_heads * (4 + 8) + sets * (6 * 8 + 4)


class KeyBuffers:
    """Room for the key codes of one piece: as stored, and one place of every byte at a time.

    Parameters
    ----------
    spec, pieces
        Give the size of a piece.

    Attributes
    ----------
    packed
        uint8, flat: the codes as stored.
    spread
        int64, flat: the bytes with one code each; empty where a byte stores no more than one.
    values
        float32, flat: those codes as numbers.
    """

    def __init__(self, spec: KernelSpec, pieces: Pieces = USUAL) -> None:
        self.pieces = pieces
        codes = pieces.product_tokens(spec) * spec.kv_heads * spec.padded_head_dim
        packed_bytes = codes * spec.key_mode.code_bits // 8
        spread_words = 0 if packed_bytes == codes else packed_bytes // 8
        self.packed = np.empty(packed_bytes, dtype=np.uint8)
        self.spread = torch.empty(spread_words, dtype=torch.int64)
        self.values = torch.empty(packed_bytes, dtype=torch.float32)


class KeyBufferPool:
    """Buffers kept from one call to the next, one set for each call under way at once.

    New memory costs a page fault per 4 KiB when first written, as much time as the arithmetic.

    Parameters
    ----------
    spec, pieces
        Give the size of the buffers.
    """

    def __init__(self, spec: KernelSpec, pieces: Pieces = USUAL) -> None:
        self._spec, self._pieces = spec, pieces
        self._free: deque[KeyBuffers] = deque()

    def take(self) -> KeyBuffers:
        """Return buffers that nobody else holds."""
        try:
            return self._free.pop()
        except IndexError:
            return KeyBuffers(self._spec, self._pieces)

    def give_back(self, buffers: KeyBuffers) -> None:
        """Make buffers available to the next call."""
        self._free.append(buffers)


_LIMIT = float((1 << 23) - 1)
_FLOAT32_BIAS = 127
_FLOAT32_FRACTION_BITS = 23
# P·2^k comes out of the multiplication: INT4 codes carry 2^4, INT2's κ 2^6 and one factor 2 less.
_PRODUCT_EXPONENT = {8: 0, 4: 4, 2: 5}


@dataclass(frozen=True)
class QueryRows:
    """Query codes in the order in which key codes come out of a shadow.

    Parameters
    ----------
    rows
        float32 of shape (codes per byte, segments, kv_heads, heads, bytes of one key).
    exponents
        int32 of shape (segments, kv_heads, heads, 1): what a token's exponent is added to.
    offsets
        o_h, float32 of shape (segments, kv_heads, heads, 1).
    sums
        Of the codes, times a power of two, float32 of the same shape; for INT2 only.
    """

    rows: torch.Tensor
    exponents: torch.Tensor
    offsets: torch.Tensor
    sums: torch.Tensor | None

    def take(self, segments: slice) -> QueryRows:
        """Return the rows of some of the segments."""
        return QueryRows(
            self.rows[:, segments],
            self.exponents[segments],
            self.offsets[segments],
            None if self.sums is None else self.sums[segments],
        )


def query_rows(layout: TwinLayout, queries: QueryCodes) -> QueryRows:
    """Arrange query codes for `log_weights`."""
    codes = queries.codes
    padding = layout.spec.padded_head_dim - codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, padding))
    by_place = padded.view(*codes.shape[:3], -1, layout.codes_per_byte).movedim(-1, 0)
    product_exponent = _PRODUCT_EXPONENT[layout.code_bits]
    sums = None
    if layout.code_bits == 2:
        sums = codes.sum(-1, keepdim=True).mul_(1 << product_exponent)
    return QueryRows(
        by_place.contiguous(),
        (queries.exponents + (_FLOAT32_BIAS - product_exponent - 6)).unsqueeze(-1),
        queries.offsets.unsqueeze(-1),
        sums,
    )


def log_weights(
    layout: TwinLayout, queries: QueryRows, exponents: torch.Tensor, buffers: KeyBuffers
) -> torch.Tensor:
    """Return L' of equally many tokens of some segments (contract, section 5).

    All of it runs in float32 without rounding where the contract does not round: codes and
    products are integers below 2^24, and a power of two only moves the exponent.

    Parameters
    ----------
    layout
        Of the shadows that the codes come from.
    queries
        Rows of the same segments.
    exponents
        uint8 of shape (segments, kv_heads, tokens).
    buffers
        Hold the codes, packed, by segment, KV head, token and slice; the rest is overwritten.

    Returns
    -------
    torch.Tensor
        float32 of shape (segments, kv_heads, heads, tokens), integers below 2^24.
    """
    places, segments, kv_heads, heads, key_bytes = queries.rows.shape
    tokens = exponents.shape[-1]
    rows = queries.rows.reshape(places, segments * kv_heads, heads, key_bytes)
    packed_bytes = segments * kv_heads * tokens * key_bytes
    products = torch.empty(0)
    for place in range(places):
        keys = _key_values(layout.code_bits, place, packed_bytes, buffers)
        keys = keys.view(segments * kv_heads, tokens, key_bytes).mT
        if place == 0:
            products = torch.bmm(rows[0], keys)
        else:
            products.baddbmm_(rows[place], keys)
    products = products.view(segments, kv_heads, heads, tokens)
    if queries.sums is not None:
        products += queries.sums

    unmoved = _FLOAT32_BIAS - _PRODUCT_EXPONENT[layout.code_bits]
    moves = exponents.to(torch.int32).unsqueeze(2) + queries.exponents
    moves.clamp_(unmoved - 24, unmoved + 24).bitwise_left_shift_(_FLOAT32_FRACTION_BITS)
    # (P + half) >> shift is the floor of P·2^ν + 1/2; where ν ≥ 0 the half falls off again or,
    # from 2^23 on, vanishes behind the limit.
    products.mul_(moves.view(torch.float32)).add_(0.5).floor_().clamp_(-_LIMIT, _LIMIT)
    return products.add_(queries.offsets)


def _key_values(code_bits: int, place: int, packed_bytes: int, buffers: KeyBuffers) -> torch.Tensor:
    """Return the codes at one place of every byte, times 2^(8-bits), as float32.

    A code moved to the upper bits of its byte is an int8 of that value. Eight bytes move at once;
    what a shift carries into the neighbouring byte is masked off.
    """
    codes = torch.from_numpy(buffers.packed[:packed_bytes])
    if code_bits < 8:
        upper_bits = (0xFF << (8 - code_bits)) & 0xFF
        mask = int.from_bytes(bytes([upper_bits] * 8), "little", signed=True)
        words, spread = codes.view(torch.int64), buffers.spread[: packed_bytes // 8]
        shift = 8 - code_bits * (place + 1)
        if shift:
            torch.bitwise_left_shift(words, shift, out=spread).bitwise_and_(mask)
        else:
            torch.bitwise_and(words, mask, out=spread)
        codes = spread.view(torch.uint8)
    return buffers.values[:packed_bytes].copy_(codes.view(torch.int8))


@dataclass(frozen=True)
class _Piece:
    """The same groups of some neighbouring segments."""

    segments: slice
    groups: slice


def sequence_log_weights(
    layout: TwinLayout,
    scaled: torch.Tensor,
    segments: Sequence[SegmentShadow],
    buffers: KeyBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L' of all N tokens of consecutive segments (contract, section 5).

    Parameters
    ----------
    layout
        Of the segments' shadows.
    scaled
        Queries from `scale_query`, float32 of shape (kv_heads, heads, head_dim).
    segments
        All segments of the sequence, only the last one short.
    buffers
        For this call alone.

    Returns
    -------
    weights
        int32 of shape (kv_heads, heads, N).
    invalid
        bool of shape (kv_heads, N).
    """
    spec = layout.spec
    tokens = sum(segment.tokens for segment in segments)
    padded = _groups(tokens) * GROUP_TOKENS
    weights = torch.empty((*scaled.shape[:2], padded), dtype=torch.int32)
    exponents = np.empty((spec.kv_heads, padded), dtype=np.uint8)
    step = buffers.pieces.segments_coded_at_once(spec)
    at_once = buffers.pieces.product_tokens(spec)
    for first in range(0, len(segments), step):
        some = segments[first : first + step]
        queries = query_rows(layout, code_query(scaled, [each.statistics for each in some]))
        for piece in _pieces(spec, [_groups(each.tokens) for each in some], at_once):
            _fill(layout, queries, some, piece, weights, exponents, buffers)
    invalid = torch.from_numpy(exponents[:, :tokens]) == INVALID_EXPONENT
    return weights[..., :tokens], invalid


def group_log_weights(
    layout: TwinLayout,
    scaled: torch.Tensor,
    statistics: ChannelStatistics,
    shadow: NDArray[np.uint8],
    groups: range,
    buffers: KeyBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L' of consecutive groups of one segment (contract, section 5).

    Parameters
    ----------
    layout
        Of the shadow.
    scaled
        Queries from `scale_query`.
    statistics
        The segment's.
    shadow
        uint8 of shape (beats, 64): any whole groups laid out as a segment's.
    groups
        Which of them.
    buffers
        For this call alone.

    Returns
    -------
    weights
        int32 of shape (kv_heads, heads, 64 tokens per group).
    invalid
        bool of shape (kv_heads, 64 tokens per group).
    """
    segment = SegmentShadow(0, 0, shadow, statistics)
    queries = query_rows(layout, code_query(scaled, [statistics]))
    tokens = groups.stop * GROUP_TOKENS
    weights = torch.empty((*scaled.shape[:2], tokens), dtype=torch.int32)
    exponents = np.empty((layout.spec.kv_heads, tokens), dtype=np.uint8)
    limit = buffers.pieces.product_tokens(layout.spec) // GROUP_TOKENS
    for start in range(groups.start, groups.stop, limit):
        piece = _Piece(slice(0, 1), slice(start, min(start + limit, groups.stop)))
        _fill(layout, queries, [segment], piece, weights, exponents, buffers)
    own = slice(groups.start * GROUP_TOKENS, tokens)
    return weights[..., own], torch.from_numpy(exponents[:, own]) == INVALID_EXPONENT


def _groups(tokens: int) -> int:
    return -(-tokens // GROUP_TOKENS)


def _pieces(spec: KernelSpec, groups: Sequence[int], at_once: int) -> Iterator[_Piece]:
    """Cut segments of so many groups into pieces: several full ones or a part of one."""
    limit = at_once // GROUP_TOKENS
    full = spec.segment_tokens // GROUP_TOKENS
    first = 0
    while first < len(groups):
        stop = first + 1
        while stop < len(groups) and groups[stop] == full and (stop - first + 1) * full <= limit:
            stop += 1
        # A long segment in equal parts, rather than the largest possible ones and a rest.
        parts = -(-groups[first] // limit)
        for part in range(parts):
            start, end = part * groups[first] // parts, (part + 1) * groups[first] // parts
            yield _Piece(slice(first, stop), slice(start, end))
        first = stop


def _fill(
    layout: TwinLayout,
    queries: QueryRows,
    segments: Sequence[SegmentShadow],
    piece: _Piece,
    weights: torch.Tensor,
    exponents: NDArray[np.uint8],
    buffers: KeyBuffers,
) -> None:
    """Put L' and exponents of a piece where they belong."""
    kv_heads = layout.spec.kv_heads
    groups = piece.groups.stop - piece.groups.start
    some = segments[piece.segments]
    start = some[0].base_position + piece.groups.start * GROUP_TOKENS
    here = slice(start, start + len(some) * groups * GROUP_TOKENS)
    codes = buffers.packed[: len(some) * kv_heads * groups * GROUP_TOKENS * layout.key_bytes]
    by_segment = codes.reshape(len(some), kv_heads, -1, layout.key_bytes)
    by_group = exponents[:, here].reshape(kv_heads, len(some), groups, GROUP_TOKENS)
    for index, segment in enumerate(some):
        layout.read(segment.shadow, piece.groups.start, by_segment[index], by_group[:, index])
    piece_exponents = torch.from_numpy(by_group).flatten(2).transpose(0, 1)
    values = log_weights(layout, queries.take(piece.segments), piece_exponents, buffers)
    room = weights[..., here].view(*weights.shape[:2], len(some), -1)
    room.copy_(values.movedim(0, 2))
