# SPDX-License-Identifier: Apache-2.0
"""Where key codes lie in a segment's shadow (contract, section 9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, SLICE_CHANNELS, KernelSpec
from hillinfer_model.key_codes import KeyCodes

Bytes = NDArray[np.uint8]


def shadow_beats(tokens: int, spec: KernelSpec) -> int:
    """Return the beats that a segment's first tokens take (contract, section 9).

    A last group of less than 64 tokens is a prefix: all exponents, then the tiles that hold tokens.
    """
    groups, rest = divmod(tokens, GROUP_TOKENS)
    tile_beats = spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS
    last = spec.kv_heads + -(-rest // spec.tile_tokens) * tile_beats if rest else 0
    return groups * spec.group_beats + last


def write_codes(shadow: Bytes, first_token: int, codes: KeyCodes, spec: KernelSpec) -> None:
    """Write the codes and exponents of consecutive tokens into a segment's shadow, in place.

    Other tokens' bytes stay as they are; a fresh shadow must be all zero.

    Parameters
    ----------
    shadow
        uint8 of shape (segment_beats, 64).
    first_token
        Index of the first token within the segment.
    codes
        The tokens, any number of them.
    spec
        Shape and key mode.

    Raises
    ------
    ValueError
        Where a shape does not fit, tokens lie outside the segment, or a code needs more bits than
        the key mode has.
    """
    tokens = codes.codes.shape[0]
    if codes.codes.shape[1:] != (spec.kv_heads, spec.head_dim):
        raise ValueError(f"key codes of shape {codes.codes.shape} do not fit the spec")
    exponents, tiles = _views(shadow, first_token, tokens, spec)
    group, within = np.divmod(np.arange(first_token, first_token + tokens), GROUP_TOKENS)
    tile, row = np.divmod(within, spec.tile_tokens)
    exponents[group, :, within] = codes.exponents
    tiles[group, tile, :, :, row] = _pack(codes.codes, spec)


def read_codes(shadow: Bytes, first_token: int, tokens: int, spec: KernelSpec) -> KeyCodes:
    """Read consecutive tokens from a segment's shadow, without the padding channels.

    Parameters
    ----------
    shadow
        uint8 of shape (segment_beats, 64).
    first_token
        Index of the first token within the segment.
    tokens
        How many to read.
    spec
        Shape and key mode.

    Raises
    ------
    ValueError
        Where a shape does not fit or tokens lie outside the segment.
    """
    exponents, tiles = _views(shadow, first_token, tokens, spec)
    group, within = np.divmod(np.arange(first_token, first_token + tokens), GROUP_TOKENS)
    tile, row = np.divmod(within, spec.tile_tokens)
    return KeyCodes(
        _unpack(tiles[group, tile, :, :, row], spec)[:, :, : spec.head_dim],
        exponents[group, :, within],
    )


def _views(shadow: Bytes, first_token: int, tokens: int, spec: KernelSpec) -> tuple[Bytes, Bytes]:
    """Return views of the exponents and tiles of every group.

    Shapes (groups, kv_heads, 64) and (groups, tiles, kv_heads, slices, tile_tokens, bytes).
    """
    if shadow.shape != (spec.segment_beats, BEAT_BYTES) or shadow.dtype != np.uint8:
        raise ValueError(
            f"a shadow of {shadow.dtype} {shadow.shape}, not uint8 ({spec.segment_beats}, 64)"
        )
    if first_token < 0 or tokens < 0 or first_token + tokens > spec.segment_tokens:
        raise ValueError(
            f"tokens {first_token}..{first_token + tokens - 1} do not lie in a segment of "
            f"{spec.segment_tokens}"
        )
    # Both reshapes only split axes, so numpy returns views whatever the strides.
    groups = shadow.reshape(-1, spec.group_beats, BEAT_BYTES)
    tiles = groups[:, spec.kv_heads :].reshape(
        groups.shape[0],
        GROUP_TOKENS // spec.tile_tokens,
        spec.kv_heads,
        spec.padded_head_dim // SLICE_CHANNELS,
        spec.tile_tokens,
        BEAT_BYTES // spec.tile_tokens,
    )
    return groups[:, : spec.kv_heads], tiles


def _pack(codes: NDArray[np.int8], spec: KernelSpec) -> Bytes:
    """Pack int8 (tokens, kv_heads, head_dim) into bytes (tokens, kv_heads, slices, bytes)."""
    bits = spec.key_mode.code_bits
    half = 2 ** (bits - 1)
    if codes.size and (codes.min() < -half or codes.max() >= half):
        raise ValueError(f"a key code does not fit {bits} bits; was it made for another key mode?")
    tokens, heads, channels = codes.shape
    padded = np.zeros((tokens, heads, spec.padded_head_dim), dtype=np.uint8)
    padded[:, :, :channels] = codes.view(np.uint8) & np.uint8(2**bits - 1)
    lanes = padded.reshape(
        tokens, heads, spec.padded_head_dim // SLICE_CHANNELS, SLICE_CHANNELS * bits // 8, 8 // bits
    )
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(lanes << shifts, axis=4))


def _unpack(packed: Bytes, spec: KernelSpec) -> NDArray[np.int8]:
    """Undo `_pack`: int8 (tokens, kv_heads, padded_head_dim), sign extended."""
    bits = spec.key_mode.code_bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    # Each code moves to the top of a byte, where an arithmetic right shift extends its sign.
    top = (packed[..., np.newaxis] >> shifts) << np.uint8(8 - bits)
    codes = top.view(np.int8) >> np.int8(8 - bits)
    return codes.reshape(packed.shape[0], packed.shape[1], spec.padded_head_dim)
