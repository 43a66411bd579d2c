# SPDX-License-Identifier: Apache-2.0
"""Float32 arithmetic whose every rounding is prescribed, in torch on any device (section 16).

Torch promises no fused multiply-add. So each is made in float64, where the product of two float32
is exact, and its sum is rounded to odd: a sum that is not exact gets an odd last bit. Float64 has
more than two bits beyond float32's, so rounding that to float32 is rounding once. A CUDA GPU has
the operation itself; that takes one kernel and not fifteen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

LANES = 16
_BIAS, _FRACTION_BITS = 1023, 52
_SOURCE = "template <typename T> T fused(T a, T b, T c) { return fmaf(a, b, c); }"


def fused_multiply_add(
    left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor
) -> torch.Tensor:
    """Return left · right + addend, rounded once to float32.

    Parameters
    ----------
    left, right, addend
        float32, broadcast against each other.
    """
    own = _of_gpu(left.device) if left.device.type == "cuda" else None
    return _rounded_to_odd(left, right, addend) if own is None else own(left, right, addend)


@cache
def _of_gpu(device: torch.device) -> Callable[..., Any] | None:
    """Return a GPU's own operation; None where it cannot be compiled, or rounds otherwise."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 1 << 14), generator=generator, dtype=torch.int64)
    left, right, addend = bits.to(torch.int32).view(torch.float32).to(device)
    # Subnormal numbers, sums that nearly cancel, and ties that a rest of the product decides.
    left[:2048] *= 2.0**-120
    addend[:2048] = 0
    addend[2048:4096] = -(left * right)[2048:4096]
    left[4096:8192] = 1 + torch.arange(4096, device=device) * 2.0**-12
    right[4096:8192] = 1 + torch.arange(4096, device=device).flip(0) * 2.0**-12
    addend[4096:8192] = 2.0 ** (torch.arange(4096, device=device) % 90 - 60)
    try:
        from torch.cuda.jiterator import _create_jit_fn

        made: Callable[..., Any] = _create_jit_fn(_SOURCE)
        found = made(left, right, addend)
    except (ImportError, AttributeError, RuntimeError):
        return None
    expected = _rounded_to_odd(left, right, addend)
    numbers = ~expected.isnan()
    same = (found.view(torch.int32) == expected.view(torch.int32)) | ~numbers
    return made if bool(same.all() & (found.isnan() == ~numbers).all()) else None


def _rounded_to_odd(left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
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
