# SPDX-License-Identifier: Apache-2.0
"""Score blocks of many queries of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hillinfer.devices.scorer import Scorer, SegmentShadow
from hillinfer.hie.key_buffers import KeyBuffers
from hillinfer.hie.query_coding import scale_query
from hillinfer.hie.score_stream import ScoreStream
from hillinfer.hie.sequence_log_weights import sequence_log_weights
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer_bench.policies.layer_queries import LayerQueries
from hillinfer_model.score_block import ScoreBlock

_QUERIES_AT_ONCE = 16


def score_each(
    scorer: Scorer, layer: LayerQueries, segments: Sequence[SegmentShadow]
) -> Iterator[Iterator[ScoreBlock]]:
    """Yield the score blocks of each query over the tokens that it sees.

    The torch scorer's own stages take any number of query rows; for it, key codes are unpacked
    and multiplied for several queries at once, which costs a third of a call for each of them.

    Parameters
    ----------
    scorer
        Executes the scoring contract.
    layer
        The queries.
    segments
        All tokens of the layer, coded.
    """
    if type(scorer) is TorchScorer:
        yield from _torch_blocks(scorer, layer, segments)
        return
    for query, length in zip(layer.queries, layer.lengths, strict=True):
        yield scorer.score(query, layer.scaling, _up_to(segments, length))


def _torch_blocks(
    scorer: TorchScorer, layer: LayerQueries, segments: Sequence[SegmentShadow]
) -> Iterator[Iterator[ScoreBlock]]:
    layout, buffers = ShadowLayout(scorer.spec), KeyBuffers(scorer.spec)
    for start in range(0, len(layer.queries), _QUERIES_AT_ONCE):
        lengths = layer.lengths[start : start + _QUERIES_AT_ONCE]
        scaled = [
            scale_query(scorer.spec, query, layer.scaling)
            for query in layer.queries[start : start + _QUERIES_AT_ONCE]
        ]
        weights, invalid = sequence_log_weights(
            layout, torch.cat(scaled, dim=1), _up_to(segments, lengths[-1]), buffers
        )
        heads = scaled[0].shape[1]
        for index, length in enumerate(lengths):
            own = weights[:, index * heads : (index + 1) * heads, :length]
            yield iter(ScoreStream(scorer.spec, scorer.scope, own, invalid[:, :length]))


def _up_to(segments: Sequence[SegmentShadow], length: int) -> list[SegmentShadow]:
    """Return the segments of the first `length` tokens, the last cut short."""
    return [
        SegmentShadow(
            segment.base_position,
            min(segment.tokens, length - segment.base_position),
            segment.shadow,
            segment.statistics,
        )
        for segment in segments
        if segment.base_position < length
    ]
