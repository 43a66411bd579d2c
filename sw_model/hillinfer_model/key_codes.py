# SPDX-License-Identifier: Apache-2.0
"""Quantises keys into the codes and exponents that a key shadow holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode
from hillinfer_model.fp16 import Fp16Parts, decode
from hillinfer_model.integers import Integers, bit_length, clamp, rne_shift_right

INVALID_EXPONENT = 255
CENTRED_LIMIT = 2**23 - 1


@dataclass(frozen=True)
class KeyCodes:
    """Quantised keys of consecutive tokens of one segment (contract, section 3).

    Parameters
    ----------
    codes
        int8 of shape (tokens, kv_heads, head_dim): -127..127 (INT8), -7..7 (INT4) or κ in -2..1
        (INT2, meaning 2κ + 1).
    exponents
        uint8 of shape (tokens, kv_heads): the token exponent t; 255 marks an invalid key, whose
        codes are all 0.
    """

    codes: NDArray[np.int8]
    exponents: NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Refuse arrays of other types or shapes that do not belong together."""
        if self.codes.dtype != np.int8 or self.exponents.dtype != np.uint8:
            raise ValueError(
                f"key codes need int8 and uint8, not {self.codes.dtype} and {self.exponents.dtype}"
            )
        if self.codes.ndim != 3 or self.codes.shape[:2] != self.exponents.shape:
            raise ValueError(
                f"key codes need shapes (tokens, kv_heads, head_dim) and (tokens, kv_heads), not "
                f"{self.codes.shape} and {self.exponents.shape}"
            )

    @property
    def invalid(self) -> NDArray[np.bool_]:
        """Whether a key holds a NaN, bool of shape (tokens, kv_heads)."""
        return np.asarray(self.exponents == INVALID_EXPONENT)


def encode_keys(
    keys: NDArray[np.uint16], statistics: ChannelStatistics, key_mode: KeyMode
) -> KeyCodes:
    """Code keys relative to their segment's channel statistics (contract, section 3).

    Parameters
    ----------
    keys
        uint16 of shape (tokens, kv_heads, head_dim), FP16 codes.
    statistics
        The segment's.
    key_mode
        Which codes to make; FP16 keys cast on the fly become the codes of INT8.

    Raises
    ------
    ValueError
        Where keys and statistics disagree in shape.
    TypeError
        Where `keys` is not uint16.
    """
    if keys.ndim != 3 or keys.shape[1:] != statistics.means.shape:
        raise ValueError(
            f"keys of shape {keys.shape} do not fit statistics of shape {statistics.means.shape}"
        )
    parts = decode(keys)
    invalid = np.asarray(parts.is_nan.any(axis=2))
    centred = _centre(parts, statistics)
    length = bit_length(np.abs(centred).max(axis=2))
    exponents = np.maximum(length - (7 if key_mode.code_bits == 8 else 3), 0)
    codes = _round_codes(centred, exponents[:, :, np.newaxis], key_mode)
    return KeyCodes(
        np.where(invalid[:, :, np.newaxis], 0, codes).astype(np.int8),
        np.where(invalid, INVALID_EXPONENT, exponents).astype(np.uint8),
    )


def _centre(parts: Fp16Parts, statistics: ChannelStatistics) -> Integers:
    """Return D = Y - M, the distance from the channel mean in units of 2^(c-14)."""
    shift = parts.exponent - statistics.exponents.astype(np.int64) - 11
    magnitude = np.where(
        shift >= 0,
        parts.magnitude << np.maximum(shift, 0),
        parts.magnitude >> np.maximum(-shift, 0),
    )
    return parts.sign * np.minimum(magnitude, CENTRED_LIMIT) - statistics.means.astype(np.int64)


def _round_codes(centred: Integers, exponents: Integers, key_mode: KeyMode) -> Integers:
    if key_mode is KeyMode.INT2:
        return np.asarray(np.clip(centred >> (exponents + 1), -2, 1))
    return clamp(rne_shift_right(centred, exponents), 2 ** (key_mode.code_bits - 1) - 1)
