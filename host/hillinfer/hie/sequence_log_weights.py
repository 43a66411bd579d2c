# SPDX-License-Identifier: Apache-2.0
"""L' of every token of a sequence, a bounded piece at a time (scoring contract, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie import scratch
from hillinfer.hie.key_buffers import KeyBuffers
from hillinfer.hie.key_coding import INVALID_EXPONENT
from hillinfer.hie.log_weights import QueryRows, log_weights, query_rows
from hillinfer.hie.query_coding import code_query
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec


@dataclass(frozen=True)
class _Piece:
    """The same groups of some neighbouring segments."""

    segments: slice
    groups: slice


def sequence_log_weights(
    layout: ShadowLayout,
    scaled: torch.Tensor,
    segments: Sequence[SegmentShadow],
    buffers: KeyBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L' of all N tokens of consecutive segments (contract, section 4).

    Parameters
    ----------
    layout
        Of the segments' shadows.
    scaled
        Queries from `scale_query`, float32 of shape (kv_heads, heads, head_dim).
    segments
        All segments of the sequence, only the last one short.
    buffers
        For this call alone.

    Returns
    -------
    weights
        int32 of shape (kv_heads, heads, N).
    invalid
        bool of shape (kv_heads, N).
    """
    spec = layout.spec
    tokens = sum(segment.tokens for segment in segments)
    padded = _groups(tokens) * GROUP_TOKENS
    weights = torch.empty((*scaled.shape[:2], padded), dtype=torch.int32)
    exponents = np.empty((spec.kv_heads, padded), dtype=np.uint8)
    step = scratch.segments_coded_at_once(spec)
    for first in range(0, len(segments), step):
        some = segments[first : first + step]
        queries = query_rows(layout, code_query(scaled, [each.statistics for each in some]))
        for piece in _pieces(spec, [_groups(each.tokens) for each in some]):
            _fill(layout, queries, some, piece, weights, exponents, buffers)
    invalid = torch.from_numpy(exponents[:, :tokens]) == INVALID_EXPONENT
    return weights[..., :tokens], invalid


def group_log_weights(
    layout: ShadowLayout,
    scaled: torch.Tensor,
    statistics: ChannelStatistics,
    shadow: NDArray[np.uint8],
    groups: range,
    buffers: KeyBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return L' of consecutive groups of one segment (contract, section 4).

    Parameters
    ----------
    layout
        Of the shadow.
    scaled
        Queries from `scale_query`.
    statistics
        The segment's.
    shadow
        uint8 of shape (beats, 64): any whole groups laid out as a segment's.
    groups
        Which of them.
    buffers
        For this call alone.

    Returns
    -------
    weights
        int32 of shape (kv_heads, heads, 64 tokens per group).
    invalid
        bool of shape (kv_heads, 64 tokens per group).
    """
    segment = SegmentShadow(0, 0, shadow, statistics)
    queries = query_rows(layout, code_query(scaled, [statistics]))
    tokens = groups.stop * GROUP_TOKENS
    weights = torch.empty((*scaled.shape[:2], tokens), dtype=torch.int32)
    exponents = np.empty((layout.spec.kv_heads, tokens), dtype=np.uint8)
    limit = scratch.product_tokens(layout.spec) // GROUP_TOKENS
    for start in range(groups.start, groups.stop, limit):
        piece = _Piece(slice(0, 1), slice(start, min(start + limit, groups.stop)))
        _fill(layout, queries, [segment], piece, weights, exponents, buffers)
    own = slice(groups.start * GROUP_TOKENS, tokens)
    return weights[..., own], torch.from_numpy(exponents[:, own]) == INVALID_EXPONENT


def _groups(tokens: int) -> int:
    return -(-tokens // GROUP_TOKENS)


def _pieces(spec: KernelSpec, groups: Sequence[int]) -> Iterator[_Piece]:
    """Cut segments of so many groups into pieces: several full ones or a part of one."""
    limit = scratch.product_tokens(spec) // GROUP_TOKENS
    full = spec.segment_tokens // GROUP_TOKENS
    first = 0
    while first < len(groups):
        stop = first + 1
        while stop < len(groups) and groups[stop] == full and (stop - first + 1) * full <= limit:
            stop += 1
        # A long segment in equal parts, rather than the largest possible ones and a rest.
        parts = -(-groups[first] // limit)
        for part in range(parts):
            start, end = part * groups[first] // parts, (part + 1) * groups[first] // parts
            yield _Piece(slice(first, stop), slice(start, end))
        first = stop


def _fill(
    layout: ShadowLayout,
    queries: QueryRows,
    segments: Sequence[SegmentShadow],
    piece: _Piece,
    weights: torch.Tensor,
    exponents: NDArray[np.uint8],
    buffers: KeyBuffers,
) -> None:
    """Put L' and exponents of a piece where they belong."""
    kv_heads = layout.spec.kv_heads
    groups = piece.groups.stop - piece.groups.start
    some = segments[piece.segments]
    start = some[0].base_position + piece.groups.start * GROUP_TOKENS
    here = slice(start, start + len(some) * groups * GROUP_TOKENS)
    codes = buffers.packed[: len(some) * kv_heads * groups * GROUP_TOKENS * layout.key_bytes]
    by_segment = codes.reshape(len(some), kv_heads, -1, layout.key_bytes)
    by_group = exponents[:, here].reshape(kv_heads, len(some), groups, GROUP_TOKENS)
    for index, segment in enumerate(some):
        layout.read(segment.shadow, piece.groups.start, by_segment[index], by_group[:, index])
    piece_exponents = torch.from_numpy(by_group).flatten(2).transpose(0, 1)
    values = log_weights(layout, queries.take(piece.segments), piece_exponents, buffers)
    room = weights[..., here].view(*weights.shape[:2], len(some), -1)
    room.copy_(values.movedim(0, 2))
