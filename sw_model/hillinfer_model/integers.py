# SPDX-License-Identifier: Apache-2.0
"""Exact int64 arithmetic that the scoring contract is written in (contract, section 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def bit_length(values: Integers | int) -> Integers:
    """Return the number of bits of non-negative integers, 0 for 0.

    Parameters
    ----------
    values
        int64 of any shape, 0..2^63-1.

    Raises
    ------
    ValueError
        Where a value is negative.
    """
    integers = np.asarray(values, dtype=np.int64)
    if np.any(integers < 0):
        raise ValueError(f"bit_length of a negative value ({integers.min()}); pass its magnitude")
    # A float64 holds 53 bits: frexp of the whole would round 2^62-1 up to the next power of two.
    high = integers >> 32
    high_bits = np.frexp(high.astype(np.float64))[1] + 32
    low_bits = np.frexp((integers & 0xFFFF_FFFF).astype(np.float64))[1]
    return np.asarray(np.where(high > 0, high_bits, low_bits), dtype=np.int64)


def clamp(values: Integers, limit: int) -> Integers:
    """Limit int64 values to -limit..limit."""
    return np.clip(values, -limit, limit)


def rne_shift_right(values: Integers | int, shift: Integers | int) -> Integers:
    """Return values · 2^-shift rounded half to even.

    Parameters
    ----------
    values
        int64 of any shape.
    shift
        int64 that broadcasts against `values`, 0..62.

    Raises
    ------
    ValueError
        Where a shift lies outside 0..62.
    """
    integers = np.asarray(values, dtype=np.int64)
    amount = np.asarray(shift, dtype=np.int64)
    if np.any((amount < 0) | (amount > 62)):
        raise ValueError(f"shift {amount} is outside 0..62")
    unit = np.int64(1) << amount
    floor = integers >> amount
    return floor + _rounds_up(floor, integers - (floor << amount), unit)


def rne_divide(values: Integers | int, divisor: int) -> Integers:
    """Return values / divisor rounded half to even, for a positive divisor below 2^62.

    Parameters
    ----------
    values
        int64 of any shape.
    divisor
        A positive integer.

    Raises
    ------
    ValueError
        Where the divisor is not positive.
    """
    if divisor <= 0:
        raise ValueError(f"divisor {divisor} is not positive")
    integers = np.asarray(values, dtype=np.int64)
    floor = integers // divisor
    return floor + _rounds_up(floor, integers - floor * divisor, np.asarray(divisor, np.int64))


def shift_half_up(values: Integers, shift: Integers) -> Integers:
    """Return values << shift, or for a negative shift (values + 2^(-shift-1)) >> -shift.

    The one alignment of the contract (sections 4 and 5). Exact while the result and the added
    half fit 63 bits, which the contract's limits on both guarantee.

    Parameters
    ----------
    values, shift
        int64, broadcast against each other.
    """
    left = np.maximum(shift, 0)
    right = np.maximum(-shift, 0)
    half = (np.int64(1) << right) >> 1
    return np.asarray(np.where(shift >= 0, values << left, (values + half) >> right))


def _rounds_up(floor: Integers, rest: Integers, unit: Integers) -> Integers:
    """Return 1 where floor + rest/unit rounds up: beyond half, or at half when floor is odd."""
    # rest against unit - rest, because twice the rest may need 64 bits.
    beyond = rest > unit - rest
    tie = (rest == unit - rest) & ((floor & 1) == 1)
    return np.asarray(beyond | tie, dtype=np.int64)
