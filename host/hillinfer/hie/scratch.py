# SPDX-License-Identifier: Apache-2.0
"""The memory that one call of the native scorer works in."""

from __future__ import annotations

from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import PROBE_STRIDE, RECENT_TOKENS
from hillinfer_model.statistics import SINK_TOKENS

# A plan must not depend on the machine that makes it.
_THREADS = 64


def scratch_bytes(spec: KernelSpec) -> int:
    """Return an upper bound of what one call takes in memory, in bytes, with up to 64 threads.

    Holds for coding and scoring, apart from what grows with the number of tokens
    (`score_bytes_per_token`).
    """
    rows = spec.scored_heads
    # Query codes, products, L' and numbers of each row; a group of probe tokens.
    thread = rows * (spec.padded_head_dim + GROUP_TOKENS * (4 + 4) + 16)
    thread += spec.group_beats * BEAT_BYTES + 5 * BEAT_BYTES
    recent = (SINK_TOKENS + RECENT_TOKENS) * _sample_bytes(spec)
    # The scaled query.
    return _THREADS * thread + recent + _query_bytes(spec) + rows * spec.padded_head_dim * 4


def score_bytes_per_token(spec: KernelSpec, scope: Scope) -> int:
    """Return an upper bound of the bytes per token that a call holds until its end.

    L' of every scored head (int32) and the exponent of every KV head, where shadows come from the
    drive; tuple (uint32) and selected position (int64) of every set; the share of the probe tokens
    that the offsets come from, and that of the segment's query codes. A last group counts as full.
    """
    sets = 1 if scope is Scope.LAYER else spec.kv_heads
    sample = -(-_sample_bytes(spec) // PROBE_STRIDE)
    queries = -(-_query_bytes(spec) // spec.segment_tokens)
    return 4 * spec.scored_heads + spec.kv_heads + (4 + 8) * sets + sample + queries


def _sample_bytes(spec: KernelSpec) -> int:
    # L' of one token, and whether it is invalid.
    return 4 * spec.scored_heads + spec.kv_heads


def _query_bytes(spec: KernelSpec) -> int:
    # Of one segment: its codes, and as kernels read them; exponents, corrections, sums, addends.
    return spec.scored_heads * (3 * spec.padded_head_dim + 32)
