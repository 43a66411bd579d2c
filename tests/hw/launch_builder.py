# SPDX-License-Identifier: Apache-2.0
"""Lays the parts of a launch out in buffers, with gaps of noise between and around them.

Gaps make a kernel that reads or writes a wrong beat visible: what it reads there changes its
scores, and what it writes there differs from what the buffer held before.
"""

from dataclasses import dataclass, replace

import numpy as np

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.key_codes import KeyCodes
from hillinfer_model.launch import (
    QueryBlock,
    ScoreLaunch,
    ShadowLaunch,
    beat_count,
    pack_statistics,
    scope_number,
)
from hillinfer_model.layout import shadow_beats, write_codes

LARGEST_GAP = 70


@dataclass(frozen=True)
class Rows:
    """FP16 keys of a segment, uint16 (tokens, kv_heads, padded_head_dim), and their statistics.

    `extra_beats` is what a row's stride holds beside its keys: 0 for a key-only plane.
    """

    keys: np.ndarray
    statistics: ChannelStatistics
    extra_beats: int = 0

    @property
    def tokens(self):
        return self.keys.shape[0]


@dataclass(frozen=True)
class ScoreSegment:
    """What one descriptor of `score_tokens` points to; heads as wide as in memory.

    `further` are blocks of queries that are scored in the same pass, as many in every segment.
    """

    base_position: int
    keys: KeyCodes | Rows
    query: QueryBlock
    further: tuple[QueryBlock, ...] = ()

    @property
    def tokens(self):
        return self.keys.tokens if isinstance(self.keys, Rows) else self.keys.codes.shape[0]


@dataclass(frozen=True)
class ShadowSegment:
    """What one descriptor of `make_shadow` points to."""

    base_position: int
    rows: Rows


def as_stored(spec):
    """The spec whose heads are as wide as in memory."""
    return replace(spec, head_dim=spec.padded_head_dim)


def key_beats(spec):
    """Beats of one token's keys in a row."""
    return beat_count(2 * spec.kv_heads * spec.padded_head_dim)


def key_value_extra_beats(spec):
    """Beats that V adds to a row K‖V."""
    return beat_count(4 * spec.kv_heads * spec.padded_head_dim) - key_beats(spec)


class Buffer:
    """Parts put one behind the other, each behind a gap."""

    def __init__(self, generator):
        self._generator = generator
        self._parts = []
        self._beats = 0

    def noise(self, beats):
        return self._generator.integers(0, 256, (beats, 64), dtype=np.uint8)

    def put(self, content):
        """Append beats behind a gap; return where they start."""
        self._append(self.noise(int(self._generator.integers(0, LARGEST_GAP))))
        start = self._beats
        self._append(content)
        return start

    def whole(self):
        self._append(self.noise(int(self._generator.integers(1, LARGEST_GAP))))
        return np.concatenate(self._parts)

    def _append(self, content):
        self._parts.append(content)
        self._beats += content.shape[0]


def score_launch(spec, scope, segments, seed=0):
    """Build the `ScoreLaunch` of a list of `ScoreSegment`.

    Equal objects are stored once: segments that share keys or a query point to the same beats.
    """
    queries_each = 1 + max((len(segment.further) for segment in segments), default=0)
    generator = np.random.default_rng(seed)
    shadow, statistics, queries, scores = (Buffer(generator) for _ in range(4))
    places = {}

    def place(buffer, part, content):
        if id(part) not in places:
            places[id(part)] = buffer.put(content)
        return places[id(part)]

    descriptors = []
    for segment in segments:
        fields = {"row_stride": 0, "statistics": 0, "score_stride": 0}
        keys = segment.keys
        if isinstance(keys, Rows):
            fields["row_stride"] = key_beats(spec) + keys.extra_beats
            block = pack_statistics(keys.statistics, as_stored(spec))
            fields["statistics"] = place(statistics, keys.statistics, block)
            content = row_beats(spec, keys, shadow)
        else:
            content = shadow_content(spec, keys)
        assert len(segment.further) == queries_each - 1
        arrays = queries_each * (spec.kv_heads if scope is Scope.KV_HEAD else 1)
        array_beats = beat_count(4 * segment.tokens)
        if scope is Scope.KV_HEAD or queries_each > 1:
            fields["score_stride"] = array_beats + int(generator.integers(0, 3))
            array_beats = fields["score_stride"]
        descriptors.append(
            Descriptor(
                shadow=place(shadow, keys, content),
                query=place(queries, segment.query, query_blocks(spec, segment)),
                score=scores.put(scores.noise(arrays * array_beats)),
                base_position=segment.base_position,
                tokens=segment.tokens,
                **fields,
            )
        )
    return ScoreLaunch(
        segments=stack(descriptors),
        shadow=shadow.whole(),
        statistics=statistics.whole() if spec.key_mode is KeyMode.FP16 else stack([]),
        queries=queries.whole(),
        scores=scores.whole(),
        scope=scope_number(scope, queries_each),
        launch_id=int(generator.integers(0, 2**32)),
    )


def query_blocks(spec, segment):
    """The blocks of a segment's queries, one behind the other."""
    blocks = (segment.query, *segment.further)
    return np.concatenate([block.pack(as_stored(spec)) for block in blocks])


def shadow_launch(spec, segments, seed=0):
    """Build the `ShadowLaunch` of a list of `ShadowSegment`."""
    generator = np.random.default_rng(seed)
    rows, statistics, shadow = (Buffer(generator) for _ in range(3))
    descriptors = [
        Descriptor(
            shadow=shadow.put(shadow.noise(shadow_beats(segment.rows.tokens, spec))),
            query=rows.put(row_beats(spec, segment.rows, rows)),
            score=0,
            base_position=segment.base_position,
            tokens=segment.rows.tokens,
            row_stride=key_beats(spec) + segment.rows.extra_beats,
            statistics=statistics.put(pack_statistics(segment.rows.statistics, as_stored(spec))),
        )
        for segment in segments
    ]
    return ShadowLaunch(
        segments=stack(descriptors),
        rows=rows.whole(),
        statistics=statistics.whole(),
        shadow=shadow.whole(),
        launch_id=int(generator.integers(0, 2**32)),
    )


def stack(descriptors):
    beats = [descriptor.pack() for descriptor in descriptors]
    return np.concatenate([np.zeros((0, 64), dtype=np.uint8), *beats])


def shadow_content(spec, codes):
    """The beats of a segment's shadow that hold tokens."""
    segment = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
    write_codes(segment, 0, codes, as_stored(spec))
    return segment[: shadow_beats(codes.codes.shape[0], spec)]


def row_beats(spec, rows, buffer):
    """Rows as they lie in memory; whatever follows the keys is noise."""
    stride = key_beats(spec) + rows.extra_beats
    content = buffer.noise(rows.tokens * stride).reshape(rows.tokens, stride * 64)
    values = spec.kv_heads * spec.padded_head_dim
    own = np.ascontiguousarray(rows.keys, dtype="<u2").reshape(rows.tokens, values).view(np.uint8)
    content[:, : own.shape[1]] = own
    return content.reshape(-1, 64)
