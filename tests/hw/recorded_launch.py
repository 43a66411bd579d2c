# SPDX-License-Identifier: Apache-2.0
"""Launches made of recorded keys, for any shape."""

import numpy as np
from launch_builder import Rows, ShadowSegment, score_launch, shadow_launch
from launch_cases import base_of, coded

from hillinfer_model.statistics import segment_statistics

RECORDED_WIDTH = 64


def widened(recorded, heads, width):
    """Recorded heads (N, n, 64) put together to (N, heads, width), each part at other positions.

    A shape other than the recorded model's needs more channels than were recorded; parts that
    repeat are shifted along the text, so that no two channels hold the same sequence.
    """
    parts = -(-width // RECORDED_WIDTH)
    own = recorded.shape[1]
    columns = [
        np.roll(recorded[:, index % own], 37 * (index // own), axis=0)
        for index in range(heads * parts)
    ]
    tokens = recorded.shape[0]
    joined = np.stack(columns, axis=1).reshape(tokens, heads, parts * RECORDED_WIDTH)
    return np.ascontiguousarray(joined[:, :, :width])


def segments_of(spec, keys):
    for start in range(0, keys.shape[0], spec.segment_tokens):
        yield start, keys[start : start + spec.segment_tokens]


def recorded_score_launch(spec, scope, recorded):
    """Score all recorded tokens by one real query."""
    keys, query, _ = recorded
    keys = widened(keys, spec.kv_heads, spec.padded_head_dim)
    query = widened(query[np.newaxis], spec.query_heads, spec.padded_head_dim)[0]
    segments = [coded(spec, scope, start, own, query) for start, own in segments_of(spec, keys)]
    return score_launch(spec, scope, segments)


def recorded_shadow_launch(spec, recorded):
    """Make the shadow of all recorded tokens."""
    keys = widened(recorded[0], spec.kv_heads, spec.padded_head_dim)
    segments = []
    for start, own in segments_of(spec, keys):
        statistics = segment_statistics(own, 0, spec.segment_tokens, None)
        segments.append(ShadowSegment(base_of(spec, start // spec.segment_tokens), Rows(own, statistics)))
    return shadow_launch(spec, segments)
