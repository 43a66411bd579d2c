# SPDX-License-Identifier: Apache-2.0
"""Query blocks of many segments at once (contract, section 6)."""

from __future__ import annotations

import numpy as np

from hillinfer.hie.native_pieces import LaunchQueries
from hillinfer_model.beats import Beats, beat_count
from hillinfer_model.kernel_spec import BEAT_BYTES, SLICE_CHANNELS, KernelSpec


def pack_query_blocks(spec: KernelSpec, queries: LaunchQueries) -> Beats:
    """Return a query block per segment, one behind the other: `QueryBlock.pack` of each."""
    count = len(queries.exponents)
    parts = [
        queries.addends.astype("<i4").view(np.uint8).reshape(count, -1),
        queries.exponents.astype(np.int8).view(np.uint8),
        queries.codes.reshape(*_by_head(spec, count)).swapaxes(2, 3).reshape(count, -1),
    ]
    sizes = [beat_count(part.shape[1]) * BEAT_BYTES for part in parts]
    blocks = np.zeros((count, sum(sizes)), dtype=np.uint8)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        blocks[:, start : start + part.shape[1]] = part.view(np.uint8)
        start += size
    return blocks.reshape(-1, BEAT_BYTES)


def unpack_query_blocks(spec: KernelSpec, blocks: Beats, count: int) -> LaunchQueries:
    """Return what `pack_query_blocks` was given, of `count` segments."""
    heads = spec.scored_heads
    rows = blocks.reshape(count, -1)
    exponents_at = beat_count(4 * heads) * BEAT_BYTES
    codes_at = exponents_at + beat_count(heads) * BEAT_BYTES
    by_slice = rows[:, codes_at : codes_at + heads * spec.padded_head_dim].view(np.int8)
    kv_heads, slices, own, channels = _by_slice(spec)
    return LaunchQueries(
        np.ascontiguousarray(
            by_slice.reshape(count, kv_heads, slices, own, channels)
            .swapaxes(2, 3)
            .reshape(count, heads, -1)
        ),
        rows[:, exponents_at : exponents_at + heads].view(np.int8).astype(np.int32),
        np.ascontiguousarray(rows[:, : 4 * heads]).view("<i4").astype(np.int32),
    )


def _by_slice(spec: KernelSpec) -> tuple[int, int, int, int]:
    slices = spec.padded_head_dim // SLICE_CHANNELS
    return spec.kv_heads, slices, spec.scored_heads // spec.kv_heads, SLICE_CHANNELS


def _by_head(spec: KernelSpec, count: int) -> tuple[int, int, int, int, int]:
    kv_heads, slices, own, channels = _by_slice(spec)
    return count, kv_heads, own, slices, channels
