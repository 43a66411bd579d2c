# SPDX-License-Identifier: Apache-2.0
"""A sequence taken apart into what a session's files hold, its rows left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.model_shape import ModelShape
from hillinfer.sessions.errors import damaged
from hillinfer.sessions.saved_session import SavedSession
from hillinfer.sessions.session_files import (
    CHANNEL_BYTES,
    HIT_BYTES,
    Part,
    SessionExtent,
    slot_bytes,
)
from hillinfer.storage.sequence import Sequence

if TYPE_CHECKING:
    from hillinfer.storage.shadow_keeper import ShadowKeeper

# Stands for a segment of a layer that has taken no statistics yet.
UNCODED = -1


def extent_of(sequence: Sequence) -> SessionExtent:
    """Return how much a session of this sequence holds."""
    queries = {0 if one is None else len(one) for one in sequence.observed}
    return SessionExtent(
        tokens=len(sequence.token_ids),
        segments=len(sequence.segments),
        # Queries count once, in all layers of a step; without those of one layer none matter.
        observed_queries=queries.pop() if len(queries) == 1 else 0,
    )


def parts_of(
    sequence: Sequence, shape: ModelShape, shadow: ShadowKeeper
) -> Iterator[tuple[Part, Iterator[memoryview]]]:
    """Yield every part and its bytes, in pieces, each valid until the next.

    Parameters
    ----------
    sequence
        What to save.
    shape
        The model's.
    shadow
        Keeps the sequence's shadow.
    """
    extent = extent_of(sequence)
    # A copy: an array that others look into cannot grow, and a held error looks into it.
    yield Part.TOKENS, iter([_bytes(np.array(sequence.token_ids, "<i4"))])
    yield Part.TAILS, (_bytes(tail[: extent.open_rows]) for tail in sequence.tails)
    yield Part.CODED, iter([_bytes(_coded(sequence))])
    yield Part.STATISTICS, _statistics(sequence, shape.kv_heads * shape.head_dim)
    yield Part.SHADOW, _shadow(sequence, shape, shadow)
    yield Part.HITS, _hits(sequence, extent.tokens)
    yield Part.OBSERVED, _observed(sequence) if extent.observed_queries else iter(())


def fill_sequence(saved: SavedSession, sequence: Sequence, tokens: int, most_queries: int) -> None:
    """Put back what a sequence kept beside rows and shadow.

    Parameters
    ----------
    saved
        Verified.
    sequence
        With room for the hits of `tokens`.
    tokens
        How many of the session's tokens it takes; the open group and the queries come back only
        with all of them.
    most_queries
        Last prefill queries of a layer that there is room for.
    """
    extent, shape = saved.manifest.extent, saved.manifest.shape
    for layer, counts in enumerate(sequence.hits.counts):
        own = np.empty(tokens, "<u2")
        saved.read_into(Part.HITS, own.view(np.uint8), layer * extent.tokens * HIT_BYTES)
        counts[:tokens] = own
    if tokens < extent.tokens:
        return
    for layer, tail in enumerate(sequence.tails):
        open_rows = tail[: extent.open_rows]
        saved.read_into(Part.TAILS, open_rows, layer * open_rows.nbytes)
    if extent.observed_queries and most_queries:
        size = (shape.layers, extent.observed_queries, shape.query_heads, shape.head_dim)
        queries = saved.array(Part.OBSERVED, "<f4", size)
        if not np.isfinite(queries).all():
            raise damaged(saved.directory, f"{Part.OBSERVED.value} holds queries without end")
        sequence.observed = [torch.from_numpy(own[-most_queries:].copy()) for own in queries]


def _coded(sequence: Sequence) -> NDArray[np.int32]:
    return np.array(
        [
            [UNCODED if own.statistics is None else own.coded_tokens for own in segment.layers]
            for segment in sequence.segments
        ],
        "<i4",
    )


def _statistics(sequence: Sequence, channels: int) -> Iterator[memoryview]:
    for segment in sequence.segments:
        for statistics in (own.statistics for own in segment.layers):
            if statistics is None:
                yield memoryview(bytes(channels * CHANNEL_BYTES))
            else:
                yield _bytes(statistics.exponents)
                yield _bytes(statistics.means.astype("<i4"))


def _shadow(sequence: Sequence, shape: ModelShape, shadow: ShadowKeeper) -> Iterator[memoryview]:
    for layer in range(shape.layers):
        made = shadow.shadows(layer, sequence)
        padding = slot_bytes(shadow.spec) - shadow.spec.segment_bytes
        for segment in made:
            yield _bytes(segment.shadow)
            yield memoryview(bytes(padding))
        for _ in range(len(sequence.segments) - len(made)):
            yield memoryview(bytes(slot_bytes(shadow.spec)))


def _hits(sequence: Sequence, tokens: int) -> Iterator[memoryview]:
    for counts in sequence.hits.counts:
        own = np.zeros(tokens, "<u2")
        own[: len(counts)] = counts[:tokens]
        yield _bytes(own)


def _observed(sequence: Sequence) -> Iterator[memoryview]:
    for queries in sequence.observed:
        assert isinstance(queries, torch.Tensor)
        yield _bytes(queries.contiguous().numpy().astype("<f4"))


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
