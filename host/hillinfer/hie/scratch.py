# SPDX-License-Identifier: Apache-2.0
"""How much the torch scorer works on at once, and the memory that takes."""

from __future__ import annotations

from hillinfer.hie.channel_statistics import STATISTICS_BYTES_PER_CHANNEL
from hillinfer.hie.key_coding import CODING_BYTES_PER_CHANNEL
from hillinfer.hie.offsets import PROBE_STRIDE, RECENT_TOKENS, SINKS
from hillinfer.hie.query_coding import QUERY_BYTES_PER_CHANNEL
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

_MIB = 1 << 20
_CODING_BYTES = 3 * _MIB // 2
_QUERY_BYTES = _MIB // 4
# Enough to hide most of what a torch call costs: twice as much scored a tenth faster, but took
# more from hot rows than that is worth.
_PRODUCT_BYTES = 3 * _MIB
_FINAL_BYTES = 3 * _MIB // 2


def coding_tokens(spec: KernelSpec) -> int:
    """Return how many tokens' keys are coded at once: a multiple of a group, at least one."""
    return _tokens_within(_CODING_BYTES, _coding_bytes(spec))


def product_tokens(spec: KernelSpec) -> int:
    """Return how many tokens' products are made at once: a multiple of a group, at least one."""
    return _tokens_within(_PRODUCT_BYTES, _key_bytes(spec) + _product_bytes(spec))


def segments_coded_at_once(spec: KernelSpec) -> int:
    """Return for how many segments the queries are coded at once, at least one."""
    return max(_QUERY_BYTES // _query_bytes(spec), 1)


def final_tokens(spec: KernelSpec, sets: int) -> int:
    """Return how many tokens' score codes are made at once for so many selected sets."""
    return _tokens_within(_FINAL_BYTES, _final_bytes(spec, sets))


def scratch_bytes(spec: KernelSpec) -> int:
    """Return an upper bound of what one call of the torch scorer takes in memory, in bytes.

    Holds for `statistics`, `encode` and `score`, apart from what grows with the number of tokens
    (`score_bytes_per_token`) and from what the BLAS library keeps for itself. The key buffers in
    it stay allocated from one call of `score` to the next.
    """
    keys = product_tokens(spec) * _key_bytes(spec)
    coding = coding_tokens(spec) * _coding_bytes(spec)
    # Sums, means and their temporaries of one segment's channels.
    coding += 64 * spec.kv_heads * spec.padded_head_dim
    queries = segments_coded_at_once(spec) * _query_bytes(spec)
    products = product_tokens(spec) * _product_bytes(spec)
    finals = max(final_tokens(spec, sets) * _final_bytes(spec, sets) for sets in (1, spec.kv_heads))
    recent = (SINKS + RECENT_TOKENS) * _sample_bytes(spec)
    return keys + max(coding, queries + products, finals, recent)


def score_bytes_per_token(spec: KernelSpec) -> int:
    """Return an upper bound of the bytes per token that a call of `score` holds until its end.

    L' of every scored head (int32); exponent, validity and tuple (uint32) of every KV head; and
    the share of the probe tokens that the offsets come from. A last group counts as full.
    """
    sample = -(-_sample_bytes(spec) // PROBE_STRIDE)
    return 4 * spec.scored_heads + (1 + 1 + 1 + 4) * spec.kv_heads + sample


def _tokens_within(limit: int, bytes_per_token: int) -> int:
    return max(limit // bytes_per_token // GROUP_TOKENS, 1) * GROUP_TOKENS


def _coding_bytes(spec: KernelSpec) -> int:
    per_channel = max(CODING_BYTES_PER_CHANNEL, STATISTICS_BYTES_PER_CHANNEL)
    # Exponents on the way, and where in its tile a token lies.
    return spec.kv_heads * (spec.padded_head_dim * per_channel + 16) + 6 * 8


def _key_bytes(spec: KernelSpec) -> int:
    # Codes as stored; those of one place in every byte with a byte each, and as float32.
    packed = spec.kv_heads * spec.padded_head_dim * spec.key_mode.code_bits // 8
    return packed * (1 + 1 + 4)


def _product_bytes(spec: KernelSpec) -> int:
    # Products, a copy of them, their scales; exponents as int32.
    return spec.scored_heads * (4 + 4 + 4) + spec.kv_heads * 8


def _query_bytes(spec: KernelSpec) -> int:
    return spec.scored_heads * spec.padded_head_dim * QUERY_BYTES_PER_CHANNEL


def _final_bytes(spec: KernelSpec, sets: int) -> int:
    # Z, w in its place, a float64 of it; sums, their bits and magnitudes, a mask; tuples.
    return spec.scored_heads * (4 + 8) + sets * (6 * 8 + 4)


def _sample_bytes(spec: KernelSpec) -> int:
    # L' of one probe token, a copy, and its weight as float64.
    return spec.scored_heads * (4 + 4 + 8) + spec.kv_heads * 2
