# SPDX-License-Identifier: Apache-2.0
"""Value codes and their channel statistics, in torch on any device (contract, section 14).

All numbers are integers below 2^57, in int64 or exact in float64, so no device rounds otherwise.
"""

from __future__ import annotations

import torch

from hillinfer_model.key_codes import CENTRED_LIMIT, INVALID_EXPONENT
from hillinfer_model.statistics import DEFAULT_EXPONENT, LEAST_TOKENS, MEAN_LIMIT, SINK_TOKENS
from hillinfer_model.value_codes import CODE_LIMIT

_LARGEST = 65504.0
Statistics = tuple[torch.Tensor, torch.Tensor]


def value_statistics(
    values: torch.Tensor, first_position: int, segment_tokens: int, preceding: Statistics | None
) -> Statistics:
    """Return c and M of a segment's values (contract, sections 3 and 14).

    Parameters
    ----------
    values
        float16 of shape (tokens, kv_heads, head_dim): the segment's tokens so far.
    first_position
        Logical position of the first of them; the sinks are left out.
    segment_tokens
        Segment length.
    preceding
        c and M of the segment before, None for the first.

    Returns
    -------
    c, int8, and M, int32, both of shape (kv_heads, head_dim).

    Raises
    ------
    ValueError
        The tokens do not lie in one segment, or `preceding` is missing or not to be there.
    """
    if first_position < 0 or first_position % segment_tokens + values.shape[0] > segment_tokens:
        raise ValueError(
            f"{values.shape[0]} tokens from position {first_position} do not lie in one segment "
            f"of {segment_tokens}"
        )
    is_first = first_position < segment_tokens
    if is_first and preceding is not None:
        raise ValueError(f"position {first_position} is in the first segment: none precedes it")
    own = values[max(SINK_TOKENS - first_position, 0) :]
    if is_first and own.shape[0] < LEAST_TOKENS:
        like = values.new_zeros(values.shape[1:])
        return (
            torch.full_like(like, DEFAULT_EXPONENT, dtype=torch.int8),
            torch.zeros_like(like, dtype=torch.int32),
        )
    if not is_first and 2 * own.shape[0] < segment_tokens:
        if preceding is None:
            raise ValueError(
                f"{own.shape[0]} of {segment_tokens} tokens are too few for statistics of their "
                f"own; pass the preceding segment's"
            )
        return preceding
    return _own_statistics(own)


def encode_values(
    values: torch.Tensor, statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code values relative to their segment's channel statistics (contract, section 14).

    Parameters
    ----------
    values
        float16 of shape (tokens, kv_heads, head_dim).
    statistics
        c and M of the segment's values.

    Returns
    -------
    codes
        int8 of shape (tokens, kv_heads, head_dim).
    exponents
        uint8 of shape (tokens, kv_heads); 255 where a value is NaN.
    """
    channel_exponents, means = statistics
    invalid = torch.isnan(values).any(dim=2)
    limited = values.double().nan_to_num(0.0, _LARGEST, -_LARGEST)
    # Y is cut towards zero, as a shift of its magnitude does.
    scaled = limited.abs() * _power_of_two(14 - channel_exponents.long())
    magnitude = scaled.trunc().clamp(max=float(CENTRED_LIMIT)).long()
    centred = torch.where(limited < 0, -magnitude, magnitude) - means.long()
    exponents = (_bit_length(centred.abs().amax(dim=2)) - 3).clamp(min=0)
    codes = _shift_half_even(centred, exponents[..., None]).clamp(-CODE_LIMIT, CODE_LIMIT)
    return (
        codes.masked_fill(invalid[..., None], 0).to(torch.int8),
        exponents.masked_fill(invalid, INVALID_EXPONENT).to(torch.uint8),
    )


def _own_statistics(values: torch.Tensor) -> Statistics:
    tokens = values.shape[0]
    # X: the value in units of 2^-24, the least subnormal.
    fixed = (values.double().nan_to_num(0.0, _LARGEST, -_LARGEST) * 2.0**24).long()
    total = fixed.sum(dim=0)
    quotient = total.div(tokens, rounding_mode="floor")
    twice = (total - quotient * tokens) * 2
    mean = quotient + ((twice > tokens) | ((twice == tokens) & (quotient & 1 == 1)))
    deviation = (fixed - mean).abs().sum(dim=0).div(tokens, rounding_mode="floor")
    largest = fixed.abs().amax(dim=0)
    exponents = torch.maximum(_bit_length(deviation) - 21, _bit_length(largest) - 33)
    exponents = exponents.clamp(-14, 16)
    shift = exponents + 10
    means = _shift_half_even(mean << (-shift).clamp(min=0), shift.clamp(min=0))
    return exponents.to(torch.int8), means.clamp(-MEAN_LIMIT, MEAN_LIMIT).to(torch.int32)


def _bit_length(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of integers from 0 below 2^53, int64: the exponent of their float64."""
    return ((values.double().view(torch.int64) >> 52) - 1022).clamp(min=0)


def _power_of_two(powers: torch.Tensor) -> torch.Tensor:
    return ((powers + 1023) << 52).view(torch.float64)


def _shift_half_even(values: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return values · 2^-shift, rounded half to even."""
    half = (torch.ones_like(shift) << shift) >> 1
    odd = (values >> shift) & 1
    return torch.where(shift > 0, (values + half - 1 + odd) >> shift, values)
