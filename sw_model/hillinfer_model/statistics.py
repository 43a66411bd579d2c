# SPDX-License-Identifier: Apache-2.0
"""Computes a segment's channel statistics from its FP16 keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.fp16 import decode, require_fp16_codes
from hillinfer_model.integers import bit_length, clamp, rne_divide, rne_shift_right

SINK_TOKENS = 4
LEAST_TOKENS = 32
DEFAULT_EXPONENT = 4
MEAN_LIMIT = 2**23 - 1


def segment_statistics(
    keys: NDArray[np.uint16],
    first_position: int,
    segment_tokens: int,
    preceding: ChannelStatistics | None,
) -> ChannelStatistics:
    """Return a segment's exponent and mean of every channel (contract, section 3).

    Parameters
    ----------
    keys
        uint16 of shape (tokens, kv_heads, head_dim): FP16 codes of the segment's tokens so far.
    first_position
        Logical position of the first of them; the sinks (positions 0..3) are left out.
    segment_tokens
        Segment length.
    preceding
        Statistics of the segment before, which a segment less than half full takes as they are;
        None for the first segment.

    Raises
    ------
    ValueError
        Where the tokens do not lie in one segment, where the first segment is given a preceding
        one, or where a preceding one is needed and missing.
    TypeError
        Where `keys` is not uint16.
    """
    require_fp16_codes(keys)
    if keys.ndim != 3:
        raise ValueError(f"keys have shape {keys.shape}, not (tokens, kv_heads, head_dim)")
    if first_position < 0 or first_position % segment_tokens + keys.shape[0] > segment_tokens:
        raise ValueError(
            f"{keys.shape[0]} tokens from position {first_position} do not lie in one segment "
            f"of {segment_tokens}"
        )
    is_first = first_position < segment_tokens
    if is_first and preceding is not None:
        raise ValueError(f"position {first_position} is in the first segment: none precedes it")

    own = keys[max(SINK_TOKENS - first_position, 0) :]
    if is_first and own.shape[0] < LEAST_TOKENS:
        return _default_statistics(keys.shape[1:])
    if not is_first and 2 * own.shape[0] < segment_tokens:
        if preceding is None:
            raise ValueError(
                f"{own.shape[0]} of {segment_tokens} tokens are too few for statistics of their "
                f"own; pass the preceding segment's"
            )
        return preceding
    return _own_statistics(own)


def _default_statistics(shape: tuple[int, ...]) -> ChannelStatistics:
    return ChannelStatistics(
        np.full(shape, DEFAULT_EXPONENT, dtype=np.int8), np.zeros(shape, dtype=np.int32)
    )


def _own_statistics(keys: NDArray[np.uint16]) -> ChannelStatistics:
    tokens = keys.shape[0]
    parts = decode(keys)
    # X: the key in units of 2^-24, the least subnormal, so every FP16 number is an integer.
    fixed = parts.sign * (parts.magnitude << (parts.exponent - 1))
    mean = rne_divide(fixed.sum(axis=0), tokens)
    deviation = np.abs(fixed - mean).sum(axis=0) // tokens
    largest = np.abs(fixed).max(axis=0)

    exponents = np.maximum(bit_length(deviation) - 21, bit_length(largest) - 33)
    exponents = np.clip(exponents, -14, 16)
    shift = exponents + 10
    # A left shift only where c < -10, so where every |X| is below 2^23: it cannot overflow.
    means = rne_shift_right(mean << np.maximum(-shift, 0), np.maximum(shift, 0))
    return ChannelStatistics(exponents.astype(np.int8), clamp(means, MEAN_LIMIT).astype(np.int32))
