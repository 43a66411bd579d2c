# SPDX-License-Identifier: Apache-2.0
"""Offsets B and A from the tokens that every host holds (scoring contract, section 3)."""

from __future__ import annotations

import torch

from hillinfer.hie.score_codes import weights_in_place
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

SINKS = 4
RECENT_TOKENS = 256
PROBE_STRIDE = 16

# Below every L', far enough that a weight relative to any of them is 0.
_LEFT_OUT = -(1 << 27)


def sequence_offsets(
    spec: KernelSpec,
    scope: Scope,
    log_weights: torch.Tensor,
    invalid: torch.Tensor,
    coming: int = 0,
) -> torch.Tensor:
    """Return B of each head or A of each selected set (contract, section 3).

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
    """Take the columns of R ∪ Φ out of values of all N tokens (contract, section 3).

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
    """Return B: log2 of the estimated sum of a head's weights (contract, section 3).

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
    """Return A: the floor of the mean of the sums of L' over R ∪ Φ (contract, section 3).

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
