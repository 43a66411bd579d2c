# SPDX-License-Identifier: Apache-2.0
"""Key codes and token exponents from FP16 keys, in torch (scoring contract, section 2)."""

from __future__ import annotations

import torch

from hillinfer.hie.exact_powers import float32_power_of_two
from hillinfer_model.channel_statistics import ChannelStatistics

INVALID_EXPONENT = 255
_LARGEST_FP16 = 65504.0
_LARGEST_CENTRED = float((1 << 23) - 1)

# float32 values, their absolute values or the mask of NaNs beside them, int8 codes.
CODING_BYTES_PER_CHANNEL = 4 + 4 + 1


def code_keys(
    keys: torch.Tensor, statistics: ChannelStatistics, code_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys against their segment's channel statistics (contract, section 2).

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
