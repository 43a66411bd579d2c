# SPDX-License-Identifier: Apache-2.0
"""Weights and 16-bit score codes, in torch (scoring contract, section 7)."""

from __future__ import annotations

import torch

_ONE_EXPONENT = 24
_FLOAT32_BIAS = 127
_FLOAT32_FRACTION_BITS = 23
_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION_BITS = 52
_FRACTION_BITS = 8
_LARGEST_SUM = float((1 << 48) - 1)
_RAW_ZERO = 32768


def weights_in_place(exponents: torch.Tensor) -> torch.Tensor:
    """Turn Z, log2 with 8 fraction bits, into w, 2^Z in units of 2^-24 (contract, section 7).

    (256 + f) << (I + 16) has the bits of Z = 256·I + f right behind a float32's sign, so one
    addition and one shift make it, and the floor is the contract's right shift.

    Parameters
    ----------
    exponents
        Z, int32 of any shape; overwritten.

    Returns
    -------
    torch.Tensor
        float32 over the same memory: integers, 2^48 where the contract saturates at 2^48 - 1,
        which the limit on their sum makes equal.
    """
    exponents.clamp_(-(_ONE_EXPONENT + 2) << _FRACTION_BITS, 24 << _FRACTION_BITS)
    exponents.add_((_ONE_EXPONENT + _FLOAT32_BIAS) << _FRACTION_BITS)
    exponents.bitwise_left_shift_(_FLOAT32_FRACTION_BITS - _FRACTION_BITS)
    return exponents.view(torch.float32).floor_()


def weight_sum_codes(sums: torch.Tensor) -> torch.Tensor:
    """Return the score codes of sums of weights, 1..65,535 (contract, section 7).

    Parameters
    ----------
    sums
        float64 of any shape, exact below 2^53; overwritten.

    Returns
    -------
    torch.Tensor
        int64 of the same shape.
    """
    return _magnitude(sums.clamp_(max=_LARGEST_SUM)).add_(1)


def raw_sum_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the score codes of V, sums of L' less their offset (contract, section 7).

    Parameters
    ----------
    values
        int32 of any shape.

    Returns
    -------
    torch.Tensor
        int64 of the same shape, 1..65,535.
    """
    negative = values < 0
    # ~V is -V - 1.
    magnitude = _magnitude(torch.where(negative, ~values, values).to(torch.float64))
    return torch.where(negative, (_RAW_ZERO - 1) - magnitude, _RAW_ZERO + magnitude)


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return mag(v): the bit length and the 10 bits below the first, read off a float64."""
    bits = values.view(torch.int64) >> (_FLOAT64_FRACTION_BITS - 10)
    bits -= (_FLOAT64_BIAS + 9) << 10
    return torch.where(values < 1024, values.to(torch.int64), bits)
