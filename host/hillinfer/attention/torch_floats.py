# SPDX-License-Identifier: Apache-2.0
"""Float32 arithmetic whose every rounding is prescribed, in torch on any device (section 16).

Torch promises no fused multiply-add. So each is made in float64, where the product of two float32
is exact, and its sum is rounded to odd: a sum that is not exact gets an odd last bit. Float64 has
more than two bits beyond float32's, so rounding that to float32 is rounding once.
"""

from __future__ import annotations

import torch

LANES = 16
_BIAS, _FRACTION_BITS = 1023, 52


def fused_multiply_add(
    left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor
) -> torch.Tensor:
    """Return left · right + addend, rounded once to float32.

    Parameters
    ----------
    left, right, addend
        float32, broadcast against each other.
    """
    product = left.double() * right.double()
    other = addend.double()
    total = product + other
    # What rounding the sum lost, exactly (Knuth's two-sum).
    back = total - product
    lost = (product - (total - back)) + (other - back)
    even = (total.view(torch.int64) & 1) == 0
    inexact = (lost != 0) & even & torch.isfinite(total)
    # One unit towards what was lost: the same sign lengthens the number, the other shortens it.
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact, total.view(torch.int64) + step, total.view(torch.int64))
    return odd.view(torch.float64).float()


def times_power(values: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Return values · 2^powers, rounded once to float32.

    Parameters
    ----------
    values
        float32.
    powers
        int64, -1022..1023, broadcast against them.
    """
    scales = ((powers + _BIAS) << _FRACTION_BITS).view(torch.float64)
    return (values.double() * scales).float()


def inner_products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return inner products over the last axis, in sixteen lanes (contract, section 16).

    Parameters
    ----------
    query
        float32 of shape (kv_heads, heads, head_dim).
    keys
        float32 of shape (kv_heads, tokens, head_dim).

    Returns
    -------
    float32 of shape (kv_heads, heads, tokens).
    """
    missing = -query.shape[2] % LANES
    left = torch.nn.functional.pad(query, (0, missing))[:, :, None]
    right = torch.nn.functional.pad(keys, (0, missing))[:, None]
    sums = query.new_zeros(*query.shape[:2], keys.shape[1], LANES)
    for first in range(0, left.shape[3], LANES):
        part = slice(first, first + LANES)
        sums = fused_multiply_add(left[..., part], right[..., part], sums)
    while sums.shape[3] > 1:
        half = sums.shape[3] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]
