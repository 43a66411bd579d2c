# SPDX-License-Identifier: Apache-2.0
"""Quantises values into the codes and scales that a value shadow holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.fp16 import Fp16Parts, decode, require_fp16_codes
from hillinfer_model.integers import Integers, bit_length, clamp, rne_divide, rne_shift_right
from hillinfer_model.statistics import statistics_tokens

INVALID_SCALE = 255
LARGEST_SCALE = 247
CODE_LIMIT = 7
# A scale's unit, 2^-20, in units of FP16's least subnormal.
_SCALE_UNIT_BITS = 4


@dataclass(frozen=True)
class ValueCodes:
    """Quantised values of consecutive tokens of one segment (contract, section 14).

    Parameters
    ----------
    codes
        int8 of shape (tokens, kv_heads, head_dim), -7..7.
    scales
        uint8 of shape (tokens, kv_heads): 8·e + f stands for (8 + f)·2^(e-20); 255 marks an
        invalid value, whose codes are all 0.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Refuse arrays of other types or shapes that do not belong together."""
        if self.codes.dtype != np.int8 or self.scales.dtype != np.uint8:
            raise ValueError(
                f"value codes need int8 and uint8, not {self.codes.dtype} and {self.scales.dtype}"
            )
        if self.codes.ndim != 3 or self.codes.shape[:2] != self.scales.shape:
            raise ValueError(
                f"value codes need shapes (tokens, kv_heads, head_dim) and (tokens, kv_heads), "
                f"not {self.codes.shape} and {self.scales.shape}"
            )

    @property
    def invalid(self) -> NDArray[np.bool_]:
        """Whether a value holds a NaN, bool of shape (tokens, kv_heads)."""
        return np.asarray(self.scales == INVALID_SCALE)


def value_means(
    values: NDArray[np.uint16],
    first_position: int,
    segment_tokens: int,
    preceding: NDArray[np.uint16] | None,
) -> NDArray[np.uint16]:
    """Return a segment's mean value of every channel (contract, section 14).

    Parameters
    ----------
    values
        uint16 of shape (tokens, kv_heads, head_dim): FP16 codes of the segment's tokens so far.
    first_position, segment_tokens
        As for `segment_statistics`, whose errors it raises.
    preceding
        Means of the segment before, None for the first segment.

    Returns
    -------
    uint16 of shape (kv_heads, head_dim), finite FP16 codes.
    """
    own = statistics_tokens(values, first_position, segment_tokens, preceding)
    if own is None:
        assert preceding is not None
        return preceding
    if not own.shape[0]:
        return np.zeros(values.shape[1:], dtype=np.uint16)
    return _fp16_codes(rne_divide(_fixed(decode(own)).sum(axis=0), own.shape[0]))


def encode_values(values: NDArray[np.uint16], means: NDArray[np.uint16]) -> ValueCodes:
    """Code values relative to their segment's channel means (contract, section 14).

    Parameters
    ----------
    values
        uint16 of shape (tokens, kv_heads, head_dim), FP16 codes.
    means
        uint16 of shape (kv_heads, head_dim), the segment's.

    Raises
    ------
    ValueError
        Where values and means disagree in shape.
    TypeError
        Where one of them is not uint16.
    """
    require_fp16_codes(means)
    if values.ndim != 3 or values.shape[1:] != means.shape:
        raise ValueError(f"values of shape {values.shape} do not fit means of {means.shape}")
    parts = decode(values)
    invalid = np.asarray(parts.is_nan.any(axis=2))
    distances = _fixed(parts) - _fixed(decode(means))
    scales = _least_scales(np.abs(distances).max(axis=2))
    codes = clamp(rne_divide(distances, _scale_sizes(scales)[:, :, np.newaxis]), CODE_LIMIT)
    return ValueCodes(
        np.where(invalid[:, :, np.newaxis], 0, codes).astype(np.int8),
        np.where(invalid, INVALID_SCALE, scales).astype(np.uint8),
    )


def decode_values(codes: ValueCodes, means: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return what codes stand for, exact in float64; NaN where invalid (contract, section 14).

    Parameters
    ----------
    codes
        Of tokens of one segment.
    means
        uint16 of shape (kv_heads, head_dim), the segment's.
    """
    sizes = _scale_sizes(codes.scales.astype(np.int64))[:, :, np.newaxis]
    fixed = codes.codes.astype(np.int64) * sizes + _fixed(decode(means))
    return np.where(codes.invalid[:, :, np.newaxis], np.nan, np.ldexp(fixed.astype(float), -24))


def _fixed(parts: Fp16Parts) -> Integers:
    """Return X, numbers in units of 2^-24, the least subnormal."""
    return np.asarray(parts.sign * (parts.magnitude << (parts.exponent - 1)))


def _least_scales(largest: Integers) -> Integers:
    """Return the byte of the least scale s with 7.5·s at or above the largest distance."""
    # In units of 2^-20, 15 halves of s are to reach it: s >= largest / 16 / 7.5, rounded up.
    below = (largest + 119) // 120 - 1
    exponent = np.maximum(bit_length(np.maximum(below, 0)) - 4, 0)
    scales = 8 * exponent + (below >> exponent) - 7
    return np.asarray(np.clip(scales, 0, LARGEST_SCALE))


def _scale_sizes(scales: Integers) -> Integers:
    """Return scales in units of 2^-24."""
    return np.asarray((8 + (scales & 7)) << ((scales >> 3) + _SCALE_UNIT_BITS))


def _fp16_codes(fixed: Integers) -> NDArray[np.uint16]:
    """Round integers in units of 2^-24 to FP16, halves to even; at most 65504 in size."""
    size = np.abs(fixed)
    shift = np.maximum(bit_length(size) - 11, 0)
    # A carry into the next power of two carries into the exponent field too.
    codes = (shift << 10) + rne_shift_right(size, shift)
    return np.asarray(codes | np.where(fixed < 0, 0x8000, 0)).astype(np.uint16)
