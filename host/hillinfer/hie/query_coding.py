# SPDX-License-Identifier: Apache-2.0
"""Query codes and the mean correction of each segment, in torch (scoring contract, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillinfer.hie.exact_powers import float64_power_of_two
from hillinfer.native.errors import NOT_FINITE
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Rule
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec

_LOG2_E = 1.4426950408889634
_CODE_LIMIT = 127
_OFFSET_LIMIT = (1 << 23) - 1

# Of one query channel and segment: c and M, the scaled query, a product of it, the codes.
QUERY_BYTES_PER_CHANNEL = 8 + 8 + 8 + 8 + 8 + 4


@dataclass(frozen=True)
class QueryCodes:
    """One layer's queries, coded for each of some segments (contract, section 3).

    Parameters
    ----------
    codes
        float32 of shape (segments, kv_heads, heads, head_dim), integers of at most 127; `heads`
        counts the query rows of one KV head: G, or 1 where queries are summed first.
    exponents
        s_h, int32 of shape (segments, kv_heads, heads).
    offsets
        o_h, float32 of shape (segments, kv_heads, heads), integers below 2^23.
    """

    codes: torch.Tensor
    exponents: torch.Tensor
    offsets: torch.Tensor


def query_factor(scaling: float) -> float:
    """Return what a query is multiplied with, float64; it is rounded to float32 before."""
    return scaling * _LOG2_E


def scale_query(spec: KernelSpec, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Bring a query to units of log2 of the weight, before any segment (contract, section 3).

    Parameters
    ----------
    spec
        Shape and rule; `raw_sum` adds up the queries of each KV head.
    query
        float32 of shape (query_heads, head_dim).
    scaling
        What the attention function multiplies inner products with.

    Returns
    -------
    torch.Tensor
        float32 of shape (kv_heads, G or 1, head_dim).

    Raises
    ------
    NonFiniteQueryError
        The query, its sum over heads or its scaled value is not finite.
    """
    heads = query.detach().reshape(spec.kv_heads, spec.group_size, -1)
    if spec.rule is Rule.RAW_SUM:
        # Float64 sums of many float32 do round, so the order is part of the contract.
        total = heads[:, 0].to(torch.float64)
        for head in range(1, spec.group_size):
            total = total + heads[:, head]
        heads = total.to(torch.float32).unsqueeze(1)
    factor = torch.tensor(query_factor(scaling), dtype=torch.float64).to(torch.float32)
    scaled = heads * factor
    # A non-finite query cannot become finite on the way: neither a sum nor a product does that.
    if not bool(scaled.isfinite().all()):
        raise NonFiniteQueryError(NOT_FINITE)
    return scaled


def code_query(scaled: torch.Tensor, statistics: Sequence[ChannelStatistics]) -> QueryCodes:
    """Quantise a scaled query against each of some segments' channels (contract, section 3).

    Parameters
    ----------
    scaled
        float32 of shape (kv_heads, heads, head_dim), from `scale_query`.
    statistics
        Of the segments.
    """
    channel_exponents = torch.from_numpy(np.stack([each.exponents for each in statistics]))
    means = torch.from_numpy(np.stack([each.means for each in statistics])).to(torch.float64)
    channels = float64_power_of_two(channel_exponents.to(torch.int64)).unsqueeze(2)
    values = channels * scaled
    exponents = torch.frexp(values.abs().amax(-1)).exponent.sub_(7).clamp_(-128, 127)
    wide_exponents = exponents.to(torch.int64)
    values.mul_(float64_power_of_two(-wide_exponents).unsqueeze(-1))
    codes = values.round_().clamp_(-_CODE_LIMIT, _CODE_LIMIT)

    # |Σ code·M| < 2^38: float64 keeps every bit of the sum in any order, and of what follows
    # down to 2^-40; above 2^52 it rounds, but there the limit holds either way.
    correction = (codes * means.unsqueeze(2)).sum(-1)
    correction.mul_(float64_power_of_two((wide_exponents - 6).clamp_(-40, 24)))
    correction.add_(0.5).floor_().clamp_(-_OFFSET_LIMIT, _OFFSET_LIMIT)
    return QueryCodes(codes.to(torch.float32), exponents, correction.to(torch.float32))
