# SPDX-License-Identifier: Apache-2.0
"""Channel statistics of a segment, in torch (scoring contract, section 2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hillinfer.hie.exact_powers import float64_power_of_two
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec

_SINKS = 4
_LEAST_TOKENS = 32
_DEFAULT_EXPONENT = 4
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
    """Take a segment's channel statistics (contract, section 2).

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
    own = segment_tokens(spec, keys, first_position, preceding)
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


def segment_tokens(
    spec: KernelSpec,
    keys: torch.Tensor,
    first_position: int,
    preceding: ChannelStatistics | None,
) -> torch.Tensor | ChannelStatistics:
    """Return the tokens that a segment's own statistics come from, or what takes their place.

    Parameters
    ----------
    spec, keys, first_position, preceding
        As in `take_statistics`, whose errors it raises.

    Returns
    -------
    float16 of shape (tokens, kv_heads, head_dim) without the sinks, or where they are too few
    `preceding` itself or the contract's default (contract, section 2).
    """
    if first_position < 0 or (
        first_position % spec.segment_tokens + keys.shape[0] > spec.segment_tokens
    ):
        raise ValueError(
            f"{keys.shape[0]} tokens from position {first_position} on do not lie in one segment "
            f"of {spec.segment_tokens}"
        )
    if first_position < spec.segment_tokens and preceding is not None:
        raise ValueError("the first segment was given the statistics of a preceding one")
    own = keys[max(_SINKS - first_position, 0) :]
    tokens = own.shape[0]
    if first_position >= spec.segment_tokens:
        if tokens < spec.segment_tokens // 2:
            if preceding is None:
                raise ValueError(
                    f"{tokens} tokens from position {first_position} on are too few for their own "
                    f"channel statistics, and those of the preceding segment are missing"
                )
            return preceding
    elif tokens < _LEAST_TOKENS:
        shape = tuple(keys.shape[1:])
        return ChannelStatistics(
            np.full(shape, _DEFAULT_EXPONENT, dtype=np.int8), np.zeros(shape, dtype=np.int32)
        )
    return own


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
