# SPDX-License-Identifier: Apache-2.0
"""Query codes, and offsets from the tokens that every host holds, in torch (sections 4 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillinfer.native.library import NOT_FINITE
from hillinfer.scoring.arguments import query_factor
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.offsets import PROBE_STRIDE, RECENT_TOKENS
from twins.key_path import float64_power_of_two
from twins.score_codes import weights_in_place

_CODE_LIMIT = 127
_OFFSET_LIMIT = (1 << 23) - 1

# Of one query channel and segment: c and M, the scaled query, a product of it, the codes.
QUERY_BYTES_PER_CHANNEL = 8 + 8 + 8 + 8 + 8 + 4


@dataclass(frozen=True)
class QueryCodes:
    """One layer's queries, coded for each of some segments (contract, section 4).

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


def scale_query(spec: KernelSpec, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Bring a query to units of log2 of the weight, before any segment (contract, section 4).

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
    """Quantise a scaled query against each of some segments' channels (contract, section 4).

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


SINKS = 4

# Below every L', far enough that a weight relative to any of them is 0.
_LEFT_OUT = -(1 << 27)


def sequence_offsets(
    spec: KernelSpec,
    scope: Scope,
    log_weights: torch.Tensor,
    invalid: torch.Tensor,
    coming: int = 0,
) -> torch.Tensor:
    """Return B of each head or A of each selected set (contract, section 6).

    Parameters
    ----------
    spec, scope
        Rule; what shares one selected set.
    log_weights
        L', int32 of shape (kv_heads, heads, N); only the columns of R ∪ Φ are looked at.
    invalid
        bool of shape (kv_heads, N), likewise.
    coming
        Tokens that N counts and that have no key yet, so no column here: 1 where the query is
        predicted.

    Returns
    -------
    torch.Tensor
        int32 of shape (kv_heads, heads) for `weight_sum`; (1,) or (kv_heads,) for `raw_sum`.
    """
    sample, spoiled = offset_tokens(log_weights, coming), offset_tokens(invalid, coming)
    if spec.rule is Rule.WEIGHT_SUM:
        return weight_sum_offsets(sample, spoiled, log_weights.shape[-1], coming)
    if scope is Scope.LAYER:
        # One selected set: its heads are all heads, and one invalid KV head spoils a token.
        sample, spoiled = sample.flatten(0, 1).unsqueeze(0), spoiled.any(0, keepdim=True)
    return raw_sum_offsets(sample.sum(1, dtype=torch.int32), spoiled)


def offset_tokens(values: torch.Tensor, coming: int = 0) -> torch.Tensor:
    """Take the columns of R ∪ Φ out of values of all N tokens (contract, section 6).

    Parameters
    ----------
    values
        Shape (..., N), any type.
    coming
        As for `sequence_offsets`.

    Returns
    -------
    torch.Tensor
        Shape (..., |R| + |Φ|): sinks and most recent tokens, then the probe tokens outside.
    """
    tokens = values.shape[-1]
    recent = max(tokens + coming - RECENT_TOKENS, 0)
    return torch.cat(
        [
            values[..., : min(SINKS, recent)],
            values[..., recent:],
            values[..., PROBE_STRIDE : max(recent, PROBE_STRIDE) : PROBE_STRIDE],
        ],
        dim=-1,
    )


def weight_sum_offsets(
    sample: torch.Tensor, invalid: torch.Tensor, all_tokens: int, coming: int = 0
) -> torch.Tensor:
    """Return B: log2 of the estimated sum of a head's weights (contract, section 6).

    Parameters
    ----------
    sample
        L' of R ∪ Φ, int32 of shape (kv_heads, heads, tokens), in the order of `offset_tokens`;
        overwritten.
    invalid
        bool of shape (kv_heads, tokens).
    all_tokens
        N, less what is coming.
    coming
        As for `sequence_offsets`.

    Returns
    -------
    torch.Tensor
        int32 of shape (kv_heads, heads).
    """
    recent = max(all_tokens + coming - RECENT_TOKENS, 0)
    once = min(SINKS, recent) + all_tokens - recent
    counts = torch.full((sample.shape[-1],), PROBE_STRIDE, dtype=torch.float64)
    counts[:once] = 1
    sample.masked_fill_(invalid.unsqueeze(1), _LEFT_OUT)
    largest = sample.amax(-1)
    weights = weights_in_place(sample.sub_(largest.unsqueeze(-1)))
    # A sum of integers below 2^53 is exact in float64; its bits are the logarithm asked for.
    total = weights.to(torch.float64) @ counts
    logarithm = (total.view(torch.int64) >> 44) - ((1023 + 24) << 8)
    return torch.where(largest > _LEFT_OUT, largest + logarithm.to(torch.int32), 0)


def raw_sum_offsets(sample: torch.Tensor, invalid: torch.Tensor) -> torch.Tensor:
    """Return A: the floor of the mean of the sums of L' over R ∪ Φ (contract, section 6).

    Parameters
    ----------
    sample
        Sums of L' of R ∪ Φ, int32 of shape (rows, tokens); overwritten.
    invalid
        bool of the same shape.

    Returns
    -------
    torch.Tensor
        int32 of shape (rows,).
    """
    counted = (~invalid).sum(-1)
    total = sample.masked_fill_(invalid, 0).sum(-1)
    return total.div(counted.clamp_(min=1), rounding_mode="floor").to(torch.int32)
