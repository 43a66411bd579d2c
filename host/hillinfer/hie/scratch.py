# SPDX-License-Identifier: Apache-2.0
"""How much the torch scorer works on at once, and the memory that takes."""

from __future__ import annotations

from hillinfer.hie.channel_statistics import STATISTICS_BYTES_PER_CHANNEL
from hillinfer.hie.key_coding import CODING_BYTES_PER_CHANNEL
from hillinfer.hie.offsets import PROBE_STRIDE, RECENT_TOKENS, SINKS
from hillinfer.hie.query_coding import QUERY_BYTES_PER_CHANNEL
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# Enough to hide what a torch call costs, measured; more gains nothing.
_CHUNK_BYTES = 6 << 20
_QUERY_CHUNK_BYTES = 1 << 20


def coding_tokens(spec: KernelSpec) -> int:
    """Return how many tokens' keys are coded at once: a multiple of a group, at least one."""
    return _tokens_within(_coding_bytes(spec))


def product_tokens(spec: KernelSpec) -> int:
    """Return how many tokens' products are made at once: a multiple of a group, at least one."""
    return _tokens_within(_product_bytes(spec))


def segments_coded_at_once(spec: KernelSpec) -> int:
    """Return for how many segments the queries are coded at once, at least one."""
    return max(_QUERY_CHUNK_BYTES // _query_bytes(spec), 1)


def final_tokens(spec: KernelSpec) -> int:
    """Return how many tokens' score codes are made at once: a multiple of a group."""
    return _tokens_within(_final_bytes(spec))


def scratch_bytes(spec: KernelSpec) -> int:
    """Return an upper bound of what one call of the torch scorer takes in memory, in bytes.

    Holds for `statistics`, `encode` and `score`, apart from what grows with the number of tokens
    (`score_bytes_per_token`) and from what the BLAS library keeps for itself. The key buffers in
    it stay allocated from one call of `score` to the next.
    """
    coding = coding_tokens(spec) * _coding_bytes(spec)
    queries = segments_coded_at_once(spec) * _query_bytes(spec)
    products = queries + product_tokens(spec) * _product_bytes(spec)
    finals = final_tokens(spec) * _final_bytes(spec)
    recent = (SINKS + RECENT_TOKENS) * _sample_bytes(spec)
    per_channel = 64 * spec.kv_heads * spec.padded_head_dim
    return max(coding + per_channel, products, finals, recent)


def score_bytes_per_token(spec: KernelSpec) -> int:
    """Return an upper bound of the bytes per token that a call of `score` holds until its end.

    L' of every scored head (int32), whether the token is valid in each KV head, the tuples of
    scope `kv_head` (uint32), and the share of the probe tokens that the offsets come from.
    """
    sample = -(-_sample_bytes(spec) // PROBE_STRIDE)
    return 4 * spec.scored_heads + spec.kv_heads + 4 * spec.kv_heads + sample


def _tokens_within(bytes_per_token: int) -> int:
    return max(_CHUNK_BYTES // bytes_per_token // GROUP_TOKENS, 1) * GROUP_TOKENS


def _coding_bytes(spec: KernelSpec) -> int:
    per_channel = max(CODING_BYTES_PER_CHANNEL, STATISTICS_BYTES_PER_CHANNEL)
    # Exponents on the way, and where in its tile a token lies.
    return spec.kv_heads * (spec.padded_head_dim * per_channel + 16) + 6 * 8


def _product_bytes(spec: KernelSpec) -> int:
    # Packed and spread key codes with their float32; products, scales and their exponents.
    channels = spec.kv_heads * spec.padded_head_dim
    return channels * (1 + 1 + 4) + spec.scored_heads * (4 + 4 + 4) + spec.kv_heads * 8


def _query_bytes(spec: KernelSpec) -> int:
    return spec.scored_heads * spec.padded_head_dim * QUERY_BYTES_PER_CHANNEL


def _final_bytes(spec: KernelSpec) -> int:
    # Z or w with a float64 of it; then sums, their bits, magnitudes and tuples.
    return spec.scored_heads * (4 + 8) + spec.kv_heads * (8 * 8)


def _sample_bytes(spec: KernelSpec) -> int:
    # L' of one probe token, a copy, and its weight as float64.
    return spec.scored_heads * (4 + 4 + 8) + spec.kv_heads * 2
