# SPDX-License-Identifier: Apache-2.0
"""Powers of two as floating-point factors, built from their bits."""

from __future__ import annotations

import torch

_FLOAT32_BIAS = 127
_FLOAT32_FRACTION_BITS = 23
_FLOAT64_BIAS = 1023
_FLOAT64_FRACTION_BITS = 52


def float32_power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^e exactly, which `exp2` and `ldexp` of torch do not promise.

    Parameters
    ----------
    exponents
        int32, any shape, -126..127.

    Returns
    -------
    torch.Tensor
        float32 of the same shape.
    """
    return ((exponents + _FLOAT32_BIAS) << _FLOAT32_FRACTION_BITS).view(torch.float32)


def float64_power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^e exactly, which `exp2` and `ldexp` of torch do not promise.

    Parameters
    ----------
    exponents
        int64, any shape, -1022..1023.

    Returns
    -------
    torch.Tensor
        float64 of the same shape.
    """
    return ((exponents + _FLOAT64_BIAS) << _FLOAT64_FRACTION_BITS).view(torch.float64)
