# SPDX-License-Identifier: Apache-2.0
"""Inner products of query and key codes, brought to L' (scoring contract, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hillinfer.hie.key_buffers import KeyBuffers
from hillinfer.hie.query_coding import QueryCodes
from hillinfer.hie.shadow_layout import ShadowLayout

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


def query_rows(layout: ShadowLayout, queries: QueryCodes) -> QueryRows:
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
    layout: ShadowLayout, queries: QueryRows, exponents: torch.Tensor, buffers: KeyBuffers
) -> torch.Tensor:
    """Return L' of equally many tokens of some segments (contract, section 4).

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
