# SPDX-License-Identifier: Apache-2.0
"""An estimate of what activations take."""

from __future__ import annotations

from typing import Any

from hillinfer.model_shape import ModelShape

_FLOAT32_BYTES = 4
_LOGIT_COPIES = 4
_MERGE_COPIES = 4
# Freed blocks stay with the allocator and fit the next request only in part.
_ALLOCATOR_SLACK = 2


def activation_bytes(
    config: Any,
    shape: ModelShape,
    item_bytes: int,
    chunk_tokens: int,
) -> int:
    """Estimate the most that activations of one prefill chunk take.

    Counted are the residual stream and its norms, the projections, the feed-forward layer, the
    float32 sums that merge attention over blocks, and logits of one token.
    """
    hidden = int(config.hidden_size)
    feed_forward = int(
        getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    )
    heads = shape.query_heads * shape.head_dim
    projections = 2 * heads + 4 * shape.kv_heads * shape.head_dim
    per_token = item_bytes * (4 * hidden + 3 * feed_forward + projections)
    merging = _FLOAT32_BYTES * _MERGE_COPIES * heads
    logits = _FLOAT32_BYTES * _LOGIT_COPIES * int(config.vocab_size)
    return _ALLOCATOR_SLACK * (chunk_tokens * (per_token + merging) + logits)
