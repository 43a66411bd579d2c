# SPDX-License-Identifier: Apache-2.0
"""Attention of one token over rows and coded tokens, in torch, defined to the bit (section 16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer_model.coded_attention import (
    ADDEND_BITS,
    ALIGNED_LIMIT,
    BLOCK_TOKENS,
    FRACTION_BITS,
    LEAST_POWER,
    POWERS,
    PRODUCT_LIMIT,
)
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import INVALID_EXPONENT
from hillinfer_model.value_layout import code_row_bytes

# --- Float32 arithmetic whose every rounding is prescribed ---
# Torch promises no fused multiply-add. So each is made in float64, where the product of two float32
# is exact, and its sum is rounded to odd: a sum that is not exact gets an odd last bit. Float64 has
# more than two bits beyond float32's, so rounding that to float32 is rounding once. A CUDA GPU has
# the operation itself; that takes one kernel and not fifteen.

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
    except (ImportError, AttributeError, AssertionError, RuntimeError):
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


# --- Attention ---

# Below every X, and far enough from the ends of int64.
_NO_TOKEN = -(2**40)
# Shifts that leave nothing of an addend.
_MOST_SHIFT = 62


@dataclass(frozen=True)
class TorchCodedTokens:
    """Coded tokens of one segment, in ascending positions, on one device.

    Parameters
    ----------
    aligned
        L', an integer type, of shape (query_heads, tokens) (contract, section 5).
    invalid_keys
        bool of shape (tokens, kv_heads).
    codes
        int8 of shape (tokens, kv_heads, head_dim), -7..7.
    exponents
        uint8 of shape (tokens, kv_heads).
    channel_exponents, means
        c and M of the segment's values, int8 and int32 of shape (kv_heads, head_dim).
    """

    aligned: torch.Tensor
    invalid_keys: torch.Tensor
    codes: torch.Tensor
    exponents: torch.Tensor
    channel_exponents: torch.Tensor
    means: torch.Tensor


@dataclass(frozen=True)
class TorchBlocks:
    """Softmax over blocks, each relative to a power of two (contract, section 16).

    Parameters
    ----------
    powers, totals
        R and W, int64 of shape (blocks, kv_heads, heads of one).
    outputs
        O, float32 of shape (blocks, kv_heads, heads of one, head_dim).
    broken
        bool of shape (blocks, kv_heads, heads of one).
    """

    powers: torch.Tensor
    totals: torch.Tensor
    outputs: torch.Tensor
    broken: torch.Tensor


class TorchCodedAttention:
    """Attends with one softmax to exact rows and coded tokens of one layer, where they lie.

    Output bits are those of the golden model on any device, for any NaN one NaN. It is for models
    on a GPU, and for machines without the native library; on a CPU `CodedAttention` is faster.
    """

    def __init__(self, device: torch.device) -> None:
        self._table = torch.from_numpy(np.asarray(POWERS)).to(device)

    def attend(
        self,
        scaled: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        coded: Sequence[TorchCodedTokens],
    ) -> torch.Tensor:
        """Attend to exact and coded tokens (contract, section 16).

        Parameters
        ----------
        scaled
            q', float32 of shape (query_heads, head_dim); not the sum of `raw_sum`.
        keys, values
            float32 of shape (tokens, kv_heads, head_dim): the exact rows, in ascending positions.
        coded
            The coded tokens, segment by segment, ascending.

        Returns
        -------
        float32 of shape (query_heads, head_dim).

        Raises
        ------
        ValueError
            Where there is no token, or query heads do not fit the KV heads.
        """
        kv_heads = keys.shape[1]
        if scaled.shape[0] % kv_heads:
            raise ValueError(
                f"{scaled.shape[0]} query heads do not share {kv_heads} KV heads evenly"
            )
        query = scaled.view(kv_heads, -1, scaled.shape[1])
        blocks = []
        if keys.shape[0]:
            products = inner_products(query, keys.transpose(0, 1))
            blocks.append(self.exact_blocks(products, values))
        if some := [one for one in coded if one.aligned.shape[1]]:
            blocks.append(self.coded_blocks(some))
        if not blocks:
            raise ValueError("attention needs a token: both sets are empty")
        return merge(blocks).flatten(0, 1)

    def exact_blocks(self, products: torch.Tensor, values: torch.Tensor) -> TorchBlocks:
        """Return the softmax over each block of 64 rows.

        Parameters
        ----------
        products
            Inner products in log2 units, float32 of shape (kv_heads, heads of one, tokens).
        values
            float32 of shape (tokens, kv_heads, head_dim).
        """
        lost = torch.isnan(products)
        limited = products.masked_fill(lost, 0).clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
        fixed = (limited.double() * 2.0**FRACTION_BITS).round().long()
        reference, power, mantissa = self._weights(_cut(fixed, _NO_TOKEN))
        near = power.clamp(min=LEAST_POWER)
        weights = torch.where(power < LEAST_POWER, 0, mantissa).float()
        weights = times_power(weights, near - 23)
        own = _cut(values.permute(1, 2, 0), 0.0)
        outputs = values.new_zeros(*reference.shape, values.shape[2])
        count = values.shape[0]
        for token in range(min(count, BLOCK_TOKENS)):
            # Blocks that have so many tokens: what is not there must not touch a negative zero.
            blocks = -(-(count - token) // BLOCK_TOKENS)
            outputs[:blocks] = fused_multiply_add(
                weights[:blocks, ..., token, None],
                own[:blocks, :, None, :, token],
                outputs[:blocks],
            )
        broken = _cut(lost, value=False).any(dim=3)
        return TorchBlocks(reference, _totals(power, mantissa), outputs, broken)

    def coded_blocks(self, segments: Sequence[TorchCodedTokens]) -> TorchBlocks:
        """Return the softmax over each block of 64 coded tokens of each segment.

        All segments go through the same operations at once: on a GPU each of these takes as long
        however little it works on.

        Parameters
        ----------
        segments
            One or more, each with a token; the blocks of one are before those of the next.
        """
        codes = torch.cat([one.codes for one in segments])
        device, kv_heads = codes.device, codes.shape[1]
        places, numbers = _places([one.aligned.shape[1] for one in segments])
        missing, at = (torch.from_numpy(one).to(device) for one in (places < 0, places.clip(0)))
        own = torch.from_numpy(numbers).to(device)
        aligned = (
            torch.cat([one.aligned for one in segments], 1).long().view(kv_heads, -1, len(codes))
        )
        fixed = aligned.clamp(-ALIGNED_LIMIT, ALIGNED_LIMIT) << (FRACTION_BITS - 8)
        # What is not there weighs nothing, so its codes and exponents may be any.
        own_fixed = fixed[..., at].movedim(2, 0).masked_fill(missing[:, None, None], _NO_TOKEN)
        reference, power, mantissa = self._weights(own_fixed)
        exponents = torch.cat([one.exponents for one in segments])
        invalid = exponents == INVALID_EXPONENT
        own_exponents = exponents.long().masked_fill(invalid, 0)[at].transpose(1, 2)
        place = power + own_exponents[:, :, None]
        live = power >= LEAST_POWER
        top = torch.where(live, place, LEAST_POWER).amax(dim=3, keepdim=True) + 1
        shift = torch.where(live, top - place + 23 - ADDEND_BITS, _MOST_SHIFT)
        shift = shift.clamp(max=_MOST_SHIFT)
        addends = (mantissa + (torch.ones_like(shift) << (shift - 1))) >> shift
        # Integers below 2^24, exact in any order; float64 because no device rounds it further.
        sums = (addends.double() @ codes[at].transpose(1, 2).double()).float()
        distances = times_power(sums, top - ADDEND_BITS)
        totals = _totals(power, mantissa)
        means = torch.stack([one.means for one in segments])[own].float()
        units = fused_multiply_add(_unit_totals(totals)[..., None], means[:, :, None], distances)
        channels = torch.stack([one.channel_exponents for one in segments])[own].long()
        outputs = times_power(units, channels[:, :, None] - 14)
        unknown = invalid | torch.cat([one.invalid_keys for one in segments])
        broken = unknown[at].masked_fill(missing[..., None], value=False).any(dim=1)
        return TorchBlocks(reference, totals, outputs, broken[..., None].expand_as(totals))

    def _weights(self, fixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return R, I and P; weights relative to 2^R are P · 2^(I-23)."""
        reference = -(-fixed.amax(dim=3) >> FRACTION_BITS)
        relative = fixed - (reference << FRACTION_BITS)[..., None]
        place, rest = (relative >> 8) & 255, relative & 255
        steps = self._table[place + 1] - self._table[place]
        mantissa = self._table[place] + ((steps * rest + 128) >> 8)
        return reference, relative >> FRACTION_BITS, mantissa


def merge(kinds: Sequence[TorchBlocks]) -> torch.Tensor:
    """Return the outputs of blocks that are added in the order given (contract, section 16).

    Parameters
    ----------
    kinds
        Exact blocks, then coded blocks of each segment.

    Returns
    -------
    float32 of shape (kv_heads, heads of one, head_dim).
    """
    powers = torch.cat([one.powers for one in kinds])
    below = powers.amax(dim=0) - powers
    counts = below <= -LEAST_POWER
    near = below.clamp(max=-LEAST_POWER)
    totals = torch.where(counts, torch.cat([one.totals for one in kinds]) >> near, 0).sum(dim=0)
    moved = times_power(torch.cat([one.outputs for one in kinds]), -near[..., None])
    # Whatever a negative zero is added to stays as it is, a zero's sign too.
    moved = torch.where(counts[..., None], moved, -0.0)
    outputs = torch.zeros_like(moved[0])
    for block in moved:
        outputs += block
    quotients = outputs / _unit_totals(totals)[..., None]
    broken = torch.cat([one.broken for one in kinds]).any(dim=0)
    return quotients.masked_fill(broken[..., None], torch.nan)


def _cut(tokens: torch.Tensor, value: float) -> torch.Tensor:
    """Cut the last axis into blocks, a new first axis, and fill the last block up."""
    missing = -tokens.shape[-1] % BLOCK_TOKENS
    filled = torch.nn.functional.pad(tokens, (0, missing), value=value)
    blocks = filled.shape[-1] // BLOCK_TOKENS
    return filled.reshape(*tokens.shape[:-1], blocks, BLOCK_TOKENS).movedim(-2, 0)


def _places(counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the tokens of each block lie among those of all segments, and its segment.

    Parameters
    ----------
    counts
        Tokens of each segment.

    Returns
    -------
    places
        int64 of shape (blocks, 64), -1 behind the last token of a segment.
    numbers
        int64 of shape (blocks,).
    """
    blocks = [-(-count // BLOCK_TOKENS) for count in counts]
    numbers = np.repeat(np.arange(len(counts)), blocks)
    first = np.cumsum([0, *blocks])[numbers]
    inside = (np.arange(len(numbers)) - first)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    begins = np.cumsum([0, *counts])[numbers][:, None]
    return np.where(inside < np.asarray(counts)[numbers][:, None], begins + inside, -1), numbers


def _totals(power: torch.Tensor, mantissa: torch.Tensor) -> torch.Tensor:
    near = power.clamp(min=LEAST_POWER)
    return torch.where(power < LEAST_POWER, 0, (mantissa << 17) >> -near).sum(dim=3)


def _unit_totals(totals: torch.Tensor) -> torch.Tensor:
    return times_power(totals.float(), torch.full_like(totals, -40))


# --- Code rows ---

# Of 32 channels, the low halves of 16 bytes are the first 16.
_HALF_BYTES = 16


def unpack_code_rows(rows: torch.Tensor, spec: KernelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what tokens that are kept by themselves hold (contract, section 14, layout).

    Parameters
    ----------
    rows
        uint8 of shape (tokens, code row and kv exponents).

    Returns
    -------
    codes, exponents
        int8 of shape (tokens, kv_heads, head_dim), and uint8 of shape (tokens, kv_heads).
    """
    size = code_row_bytes(spec)
    halves = rows[:, :size].view(torch.int8).reshape(len(rows), spec.kv_heads, -1, 1, _HALF_BYTES)
    # Shifts of int8 keep the sign: both halves of a byte are two's complement.
    codes = torch.cat([(halves << 4) >> 4, halves >> 4], dim=3).flatten(2)
    return codes[..., : spec.head_dim], rows[:, size : size + spec.kv_heads]
