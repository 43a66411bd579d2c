# SPDX-License-Identifier: Apache-2.0
"""Beats that a launch moves, the input of the cycle model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hillinfer_model.beats import beat_count
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import FP16_BYTES, TUPLE_BYTES
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, SLICE_CHANNELS, KernelSpec
from hillinfer_model.layout import shadow_beats
from hillinfer_model.memory_model import BURST_BEATS

TUPLES_PER_BEAT = BEAT_BYTES // TUPLE_BYTES
# Scores come slowly, and the end of a launch waits for its last burst.
SCORE_BURST_BEATS = 4


@dataclass(frozen=True)
class SegmentShape:
    """As much of a segment as its time depends on.

    Parameters
    ----------
    tokens
        Tokens that the launch covers.
    row_stride
        Beats from row to row where keys are read by rows; 0 for a key-only plane or a shadow.
    first_beat
        Address of the keys in beats; bursts end at its multiples of 64.
    output_beat
        Address of the scores, or of the shadow that is made, in beats.
    """

    tokens: int
    row_stride: int = 0
    first_beat: int = 0
    output_beat: int = 0


@dataclass(frozen=True)
class WriteBurst:
    """Output beats that go out together.

    Parameters
    ----------
    after_beat
        Key beats of the segment that must have been computed.
    beats
        Beats of the burst.
    """

    after_beat: int
    beats: int


def row_beats(spec: KernelSpec) -> int:
    """Return the beats of one token's FP16 keys."""
    return beat_count(FP16_BYTES * spec.kv_heads * spec.padded_head_dim)


def key_value_row_beats(spec: KernelSpec) -> int:
    """Return the beats of one row K‖V of 16-bit numbers."""
    return beat_count(2 * FP16_BYTES * spec.kv_heads * spec.padded_head_dim)


def query_beats(spec: KernelSpec) -> int:
    """Return the beats of a query block."""
    heads = spec.scored_heads
    return beat_count(4 * heads) + beat_count(heads) + beat_count(heads * spec.padded_head_dim)


def statistics_beats(spec: KernelSpec) -> int:
    """Return the beats of a statistics block."""
    return beat_count(4 * spec.kv_heads * spec.padded_head_dim)


def key_beats(tokens: int, spec: KernelSpec) -> int:
    """Return the beats that the key port of `score_tokens` reads for tokens of one segment."""
    if spec.key_mode is KeyMode.FP16:
        return tokens * row_beats(spec)
    return shadow_beats(tokens, spec)


def code_beats(tokens: int, spec: KernelSpec) -> int:
    """Return `key_beats` without the exponent beats."""
    if spec.key_mode is KeyMode.FP16:
        return key_beats(tokens, spec)
    return key_beats(tokens, spec) - spec.kv_heads * -(-tokens // GROUP_TOKENS)


def shadow_bursts(shape: SegmentShape, spec: KernelSpec) -> Iterator[int]:
    """Yield the beats of every burst that reads a segment's shadow."""
    yield from _aligned(shape.first_beat, shadow_beats(shape.tokens, spec))


def row_bursts(shape: SegmentShape, spec: KernelSpec) -> Iterator[int]:
    """Yield the beats of every burst that reads the keys of a segment's rows."""
    beats = row_beats(spec)
    if shape.row_stride in (0, beats):
        yield from _aligned(shape.first_beat, shape.tokens * beats)
        return
    for token in range(shape.tokens):
        yield from _aligned(shape.first_beat + token * shape.row_stride, beats)


def score_writes(
    shape: SegmentShape, spec: KernelSpec, scope: Scope, queries: int = 1
) -> Iterator[WriteBurst]:
    """Yield the bursts of a segment's score arrays, of all queries, in the order of writing."""
    arrays = queries * (spec.kv_heads if scope is Scope.KV_HEAD else 1)
    if arrays > 1:
        # Beats of different heads and queries lie apart: each is a burst of its own.
        for start in range(0, shape.tokens, TUPLES_PER_BEAT):
            covered = min(start + TUPLES_PER_BEAT, shape.tokens)
            for _ in range(arrays):
                yield WriteBurst(key_beats(covered, spec), 1)
        return
    for block in range(0, shape.tokens, spec.block_tokens):
        covered, end = block, min(block + spec.block_tokens, shape.tokens)
        start = shape.output_beat + block // TUPLES_PER_BEAT
        beats_of_block = beat_count((end - block) * TUPLE_BYTES)
        for beats in _aligned(start, beats_of_block, SCORE_BURST_BEATS):
            covered = min(covered + beats * TUPLES_PER_BEAT, end)
            yield WriteBurst(key_beats(covered, spec), beats)


def shadow_writes(shape: SegmentShape, spec: KernelSpec) -> Iterator[WriteBurst]:
    """Yield the bursts of a segment's new shadow: a group's tiles, then its exponents."""
    per_tile = spec.kv_heads * spec.padded_head_dim // SLICE_CHANNELS
    per_row = row_beats(spec)
    for group in range(-(-shape.tokens // GROUP_TOKENS)):
        first = group * GROUP_TOKENS
        own = min(shape.tokens - first, GROUP_TOKENS)
        start = shape.output_beat + group * spec.group_beats + spec.kv_heads
        done = 0
        for beats in _aligned(start, -(-own // spec.tile_tokens) * per_tile):
            done += beats
            covered = min(-(-done // per_tile) * spec.tile_tokens, own)
            yield WriteBurst((first + covered) * per_row, beats)
        yield WriteBurst((first + own) * per_row, spec.kv_heads)


def _aligned(first_beat: int, beats: int, most: int = BURST_BEATS) -> Iterator[int]:
    """Cut a linear range into bursts that end at multiples of the most beats one may have."""
    at, left = first_beat, beats
    while left:
        burst = min(most - at % most, left)
        yield burst
        at += burst
        left -= burst
