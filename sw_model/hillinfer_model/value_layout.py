# SPDX-License-Identifier: Apache-2.0
"""Where value codes lie in a segment's value shadow (contract, section 14)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.value_codes import CODE_LIMIT

Bytes = NDArray[np.uint8]
# Channels of 16 bytes: the first half in the low nibbles, the second in the high ones.
BLOCK_CHANNELS = 32


def value_dim(spec: KernelSpec) -> int:
    """Return the channels of one head in a value shadow: a multiple of 32, at least 64."""
    return max(64, -(-spec.head_dim // BLOCK_CHANNELS) * BLOCK_CHANNELS)


def code_row_bytes(spec: KernelSpec) -> int:
    """Return the bytes of one token's codes, all KV heads."""
    return spec.kv_heads * value_dim(spec) // 2


def value_group_beats(spec: KernelSpec) -> int:
    """Return the beats of 64 tokens: exponents, then code rows (contract, section 14)."""
    return spec.kv_heads + code_row_bytes(spec) * GROUP_TOKENS // BEAT_BYTES


def value_segment_beats(spec: KernelSpec) -> int:
    """Return the beats of one full segment."""
    return value_group_beats(spec) * (spec.segment_tokens // GROUP_TOKENS)


def write_values(shadow: Bytes, first_token: int, codes: KeyCodes, spec: KernelSpec) -> None:
    """Write the codes and exponents of consecutive tokens into a segment's value shadow, in place.

    Parameters
    ----------
    shadow
        uint8 of shape (value_segment_beats, 64); fresh ones are all zero.
    first_token
        Index of the first token within the segment.
    codes
        The tokens, any number of them.
    spec
        Shape.

    Raises
    ------
    ValueError
        Where a shape does not fit, tokens lie outside the segment, or a code is not in -7..7.
    """
    tokens = codes.codes.shape[0]
    if codes.codes.shape[1:] != (spec.kv_heads, spec.head_dim):
        raise ValueError(f"value codes of shape {codes.codes.shape} do not fit the spec")
    if codes.codes.size and np.abs(codes.codes.astype(np.int64)).max() > CODE_LIMIT:
        raise ValueError("a value code is outside -7..7")
    exponents, rows = _views(shadow, first_token, tokens, spec)
    group, within = np.divmod(np.arange(first_token, first_token + tokens), GROUP_TOKENS)
    padded = np.zeros((tokens, spec.kv_heads, value_dim(spec)), dtype=np.uint8)
    padded[:, :, : spec.head_dim] = codes.codes.view(np.uint8) & 15
    halves = padded.reshape(tokens, -1, 2, BLOCK_CHANNELS // 2)
    rows[group, within] = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(tokens, -1)
    exponents[group, :, within] = codes.exponents


def read_values(shadow: Bytes, first_token: int, tokens: int, spec: KernelSpec) -> KeyCodes:
    """Read consecutive tokens from a segment's value shadow, without the padding channels.

    Parameters
    ----------
    shadow, first_token, spec
        As for `write_values`, whose errors it raises.
    tokens
        How many to read.
    """
    exponents, rows = _views(shadow, first_token, tokens, spec)
    group, within = np.divmod(np.arange(first_token, first_token + tokens), GROUP_TOKENS)
    packed = rows[group, within].reshape(tokens, -1, 1, BLOCK_CHANNELS // 2)
    # Each code moves to the top of a byte, where an arithmetic right shift extends its sign.
    top = np.concatenate([packed << 4, packed & 0xF0], axis=2).astype(np.uint8)
    codes = (top.view(np.int8) >> 4).reshape(tokens, spec.kv_heads, value_dim(spec))
    return KeyCodes(np.ascontiguousarray(codes[:, :, : spec.head_dim]), exponents[group, :, within])


def _views(shadow: Bytes, first_token: int, tokens: int, spec: KernelSpec) -> tuple[Bytes, Bytes]:
    """Return views of every group: exponents (groups, kv_heads, 64), rows (groups, 64, bytes)."""
    if shadow.shape != (value_segment_beats(spec), BEAT_BYTES) or shadow.dtype != np.uint8:
        raise ValueError(
            f"a value shadow of {shadow.dtype} {shadow.shape}, not uint8 "
            f"({value_segment_beats(spec)}, 64)"
        )
    if first_token < 0 or tokens < 0 or first_token + tokens > spec.segment_tokens:
        raise ValueError(
            f"tokens {first_token}..{first_token + tokens - 1} do not lie in a segment of "
            f"{spec.segment_tokens}"
        )
    groups = shadow.reshape(-1, value_group_beats(spec), BEAT_BYTES)
    rows = groups[:, spec.kv_heads :].reshape(groups.shape[0], GROUP_TOKENS, -1)
    return groups[:, : spec.kv_heads], rows
