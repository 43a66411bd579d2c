# SPDX-License-Identifier: Apache-2.0
"""From FP16 keys to a shadow, in torch (scoring contract, sections 3 and 9)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.scoring.arguments import statistics_tokens
from hillinfer.scoring.layout import ShadowLayout
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec

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


_LARGEST_FP16 = 65504.0
_MEAN_LIMIT = (1 << 23) - 1

# What X, its absolute value and the float32 it comes from take of one key channel.
STATISTICS_BYTES_PER_CHANNEL = 8 + 8 + 4
# |X| < 2^40 and |X - mean| < 2^41, so float64 adds this many of them without rounding.
LARGEST_EXACT_CHUNK = 2048


def take_statistics(
    spec: KernelSpec,
    keys: torch.Tensor,
    first_position: int,
    preceding: ChannelStatistics | None,
    chunk_tokens: int,
) -> ChannelStatistics:
    """Take a segment's channel statistics (contract, section 3).

    Parameters
    ----------
    spec
        Gives the segment length.
    keys
        float16 of shape (tokens, kv_heads, head_dim): the segment's tokens so far.
    first_position
        Logical position of the first of them.
    preceding
        Statistics of the segment before; None for the first segment.
    chunk_tokens
        Tokens worked on at once, which bounds the scratch memory.

    Returns
    -------
    ChannelStatistics
        The segment's own, `preceding` itself where the segment has too few tokens, or the
        contract's default where the first segment has.

    Raises
    ------
    ValueError
        The tokens do not lie in one segment, the first segment is given a preceding one, or a
        later one with too few tokens is not.
    """
    own = statistics_tokens(spec, keys, first_position, preceding)
    if isinstance(own, ChannelStatistics):
        return own

    tokens = own.shape[0]
    total = torch.zeros(keys.shape[1:], dtype=torch.int64)
    largest = torch.zeros(keys.shape[1:], dtype=torch.float64)
    for fixed in _fixed_point_chunks(own, chunk_tokens):
        total += fixed.sum(0).to(torch.int64)
        largest = torch.maximum(largest, fixed.abs_().amax(0))
    mean = _divide_half_even(total, tokens).to(torch.float64)
    deviation = torch.zeros_like(total)
    for fixed in _fixed_point_chunks(own, chunk_tokens):
        deviation += fixed.sub_(mean).abs_().sum(0).to(torch.int64)
    mean_deviation = deviation.div(tokens, rounding_mode="floor")

    exponents = torch.maximum(
        _bit_length(mean_deviation.to(torch.float64)) - 21, _bit_length(largest) - 33
    )
    exponents = exponents.clamp_(-14, 16)
    means = (mean * float64_power_of_two(-(exponents + 10))).round_()
    means.clamp_(-_MEAN_LIMIT, _MEAN_LIMIT)
    return ChannelStatistics(exponents.to(torch.int8).numpy(), means.to(torch.int32).numpy())


def _fixed_point_chunks(keys: torch.Tensor, chunk_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the contract's X, an integer, as float64: the key's value in units of 2^-24."""
    step = min(chunk_tokens, LARGEST_EXACT_CHUNK)
    for start in range(0, keys.shape[0], step):
        values = (
            keys[start : start + step]
            .to(torch.float32)
            .nan_to_num_(0.0, _LARGEST_FP16, -_LARGEST_FP16)
        )
        yield values.to(torch.float64).mul_(2.0**24)


def _divide_half_even(total: torch.Tensor, count: int) -> torch.Tensor:
    quotient = total.div(count, rounding_mode="floor")
    twice_rest = (total - quotient * count) * 2
    up = (twice_rest > count) | ((twice_rest == count) & (quotient & 1 == 1))
    return quotient + up


def _bit_length(values: torch.Tensor) -> torch.Tensor:
    # An integer below 2^53 is exact in float64, and its frexp exponent is its bit length.
    return torch.frexp(values).exponent.to(torch.int64)


INVALID_EXPONENT = 255
_LARGEST_CENTRED = float((1 << 23) - 1)

# float32 values, their absolute values or the mask of NaNs beside them, int8 codes.
CODING_BYTES_PER_CHANNEL = 4 + 4 + 1


def code_keys(
    keys: torch.Tensor, statistics: ChannelStatistics, code_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys against their segment's channel statistics (contract, section 3).

    Every number on the way is an integer below 2^24 times a power of two, so float32 holds each
    of them exactly and rounds nowhere but where the contract does.

    Parameters
    ----------
    keys
        float16 of shape (tokens, kv_heads, head_dim).
    statistics
        The segment's, of shape (kv_heads, head_dim).
    code_bits
        8, 4 or 2.

    Returns
    -------
    codes
        int8 of shape (tokens, kv_heads, head_dim); INT2 codes as κ, -2..1.
    exponents
        uint8 of shape (tokens, kv_heads); 255 where the token is invalid in the KV head.
    """
    values = keys.to(torch.float32)
    invalid = values.isnan().any(-1)
    units = float32_power_of_two(14 - torch.from_numpy(statistics.exponents).to(torch.int32))
    values.nan_to_num_(0.0, _LARGEST_FP16, -_LARGEST_FP16)
    values.mul_(units).trunc_().clamp_(-_LARGEST_CENTRED, _LARGEST_CENTRED)
    values.sub_(torch.from_numpy(statistics.means).to(torch.float32))

    bit_length = torch.frexp(values.abs().amax(-1)).exponent
    exponents = (bit_length - (7 if code_bits == 8 else 3)).clamp_(min=0)
    if code_bits == 2:
        values.mul_(float32_power_of_two(-1 - exponents).unsqueeze(-1)).floor_().clamp_(-2, 1)
    else:
        limit = 127 if code_bits == 8 else 7
        values.mul_(float32_power_of_two(-exponents).unsqueeze(-1)).round_().clamp_(-limit, limit)
    codes = values.to(torch.int8).masked_fill_(invalid.unsqueeze(-1), 0)
    return codes, exponents.masked_fill_(invalid, INVALID_EXPONENT).to(torch.uint8)


class TwinLayout(ShadowLayout):
    """A `ShadowLayout` that codes are written to and read from."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self.code_bits = spec.key_mode.code_bits
        self.codes_per_byte = 8 // self.code_bits
        self.key_bytes = spec.padded_head_dim // self.codes_per_byte

    def write(
        self,
        shadow: NDArray[np.uint8],
        first_token: int,
        codes: torch.Tensor,
        exponents: torch.Tensor,
    ) -> None:
        """Put codes and exponents of consecutive tokens into a shadow, in place.

        Parameters
        ----------
        shadow
            uint8 of shape (segment_beats, 64); what lies around the tokens stays as it is.
        first_token
            Index of the first token within the segment.
        codes
            int8 of shape (tokens, kv_heads, head_dim).
        exponents
            uint8 of shape (tokens, kv_heads).
        """
        tokens, kv_heads, _ = codes.shape
        packed = self._pack(codes).numpy().view(self._slice_type)
        group, tile, in_tile, in_group = self._places(np.arange(first_token, first_token + tokens))
        self.slice_codes(shadow)[group, tile, :, :, in_tile] = packed.reshape(
            tokens, kv_heads, self.slices
        )
        self.exponents(shadow)[group, :, in_group] = exponents.numpy()

    def read(
        self,
        shadow: NDArray[np.uint8],
        first_group: int,
        codes: NDArray[np.uint8],
        exponents: NDArray[np.uint8],
    ) -> None:
        """Copy codes and exponents of consecutive groups out of a shadow, by KV head and token.

        Parameters
        ----------
        shadow
            uint8 of shape (segment_beats, 64).
        first_group
            First group; the outputs say how many.
        codes
            Filled: uint8 of shape (kv_heads, tokens, bytes of one key), contiguous.
        exponents
            Filled: uint8 of shape (kv_heads, groups, 64).
        """
        groups = slice(first_group, first_group + exponents.shape[1])
        stored = self.slice_codes(shadow)[groups].transpose(2, 0, 1, 4, 3)
        codes.view(self._slice_type).reshape(stored.shape)[...] = stored
        exponents[...] = self.exponents(shadow)[groups].swapaxes(0, 1)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        padding = self.spec.padded_head_dim - codes.shape[-1]
        fields = torch.nn.functional.pad(codes, (0, padding)).contiguous().view(torch.uint8)
        if self.codes_per_byte == 1:
            return fields
        fields = fields.bitwise_and_((1 << self.code_bits) - 1)
        fields = fields.view(*codes.shape[:2], -1, self.codes_per_byte)
        packed = fields[..., 0].clone()
        for place in range(1, self.codes_per_byte):
            packed |= fields[..., place] << (self.code_bits * place)
        return packed
