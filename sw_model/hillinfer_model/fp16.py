# SPDX-License-Identifier: Apache-2.0
"""FP16 codes taken apart into integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INFINITY_MAGNITUDE = 2047
INFINITY_EXPONENT = 30


@dataclass(frozen=True)
class Fp16Parts:
    """FP16 numbers as sign · magnitude · 2^(exponent - 25) (contract, section 2).

    All four arrays have the shape of the codes.

    Parameters
    ----------
    sign
        int64, +1 or -1; +1 for zero and NaN.
    magnitude
        int64, 0..2047.
    exponent
        int64, 1..30; 1 for zero, subnormals and NaN.
    is_nan
        bool; a NaN's magnitude is 0.
    """

    sign: NDArray[np.int64]
    magnitude: NDArray[np.int64]
    exponent: NDArray[np.int64]
    is_nan: NDArray[np.bool_]


def decode(bits: NDArray[np.uint16]) -> Fp16Parts:
    """Take FP16 codes apart; infinities count as ±65504 and -0 as 0 (contract, section 2).

    Parameters
    ----------
    bits
        uint16 of any shape, the codes.

    Raises
    ------
    TypeError
        Where `bits` is not uint16.
    """
    require_fp16_codes(bits)
    codes = bits.astype(np.int64)
    biased = (codes >> 10) & 31
    fraction = codes & 1023
    is_infinite = (biased == 31) & (fraction == 0)
    is_nan = (biased == 31) & (fraction != 0)

    magnitude = np.where(biased != 0, 1024, 0) + fraction
    magnitude = np.where(is_infinite, INFINITY_MAGNITUDE, magnitude)
    magnitude = np.where(is_nan, 0, magnitude)
    exponent = np.where(is_infinite, INFINITY_EXPONENT, np.maximum(biased, 1))
    exponent = np.where(is_nan, 1, exponent)
    sign = np.where((codes >> 15 == 1) & (magnitude != 0), -1, 1)
    return Fp16Parts(sign, magnitude, exponent, is_nan)


def require_fp16_codes(bits: NDArray[np.uint16]) -> None:
    """Raise TypeError where an array is not uint16 (a float16 array would be converted)."""
    if bits.dtype != np.uint16:
        raise TypeError(f"FP16 codes are uint16, not {bits.dtype}; use array.view(numpy.uint16)")
