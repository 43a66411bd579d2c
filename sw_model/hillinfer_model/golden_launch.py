# SPDX-License-Identifier: Apache-2.0
"""Runs the golden model on a launch's bytes and returns the bytes that a kernel would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hillinfer_model.beats import Beats, beat_count
from hillinfer_model.choices import KeyMode, Scope
from hillinfer_model.descriptor import (
    FP16_BYTES,
    Descriptor,
    check_score_descriptor,
    check_shadow_descriptor,
)
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.key_codes import KeyCodes, encode_keys
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.launch_shape import query_beats
from hillinfer_model.layout import read_codes, shadow_beats, write_codes
from hillinfer_model.query_block import QueryBlock
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.score_launch import ScoreLaunch, scope_of
from hillinfer_model.score_tuples import WINDOW_TOKENS, make_tuples, pack_score_array
from hillinfer_model.scores import aligned_products, offset_count, score_codes
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.statistics_block import unpack_statistics
from hillinfer_model.status_beat import HASH_BYTES, StatusBeat


def run_score_launch(spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
    """Do what every execution of `score_tokens` must do, byte for byte (contract, section 10).

    Of each segment every query is scored as it would be alone (section 17).

    Parameters
    ----------
    spec
        The kernel's.
    launch
        Descriptors may be wrong: the launch then ends in an error status.

    Raises
    ------
    ValueError
        Where a sound descriptor points outside a buffer, or statistics are given to a key mode
        that reads none; a kernel does not know how long its buffers are.
    """
    if spec.key_mode is not KeyMode.FP16 and launch.statistics.shape[0]:
        raise ValueError(f"key mode {spec.key_mode} has no statistics buffer")
    scores = launch.scores.copy()

    def check(descriptor: Descriptor) -> None:
        check_score_descriptor(descriptor, spec, *_scope(launch.scope, spec))

    def score(descriptor: Descriptor) -> None:
        _score_segment(spec, launch, descriptor, scores)

    status = _run(spec, launch.segments, launch.launch_id, check, score)
    return LaunchResult(scores, status)


def run_shadow_launch(spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
    """Do what every execution of `make_shadow` must do, byte for byte (contract, section 10).

    Parameters
    ----------
    spec
        The kernel's; key mode `int8`, `int4` or `int2`.
    launch
        Descriptors may be wrong: the launch then ends in an error status.

    Raises
    ------
    ValueError
        Where the key mode has no shadow, or a sound descriptor points outside a buffer.
    """
    if spec.key_mode is KeyMode.FP16:
        raise ValueError("key mode fp16 has no shadow to make")
    shadow = launch.shadow.copy()

    def check(descriptor: Descriptor) -> None:
        check_shadow_descriptor(descriptor, spec)

    def make(descriptor: Descriptor) -> None:
        _make_segment(spec, launch, descriptor, shadow)

    status = _run(spec, launch.segments, launch.launch_id, check, make)
    return LaunchResult(shadow, status)


def _run(
    spec: KernelSpec,
    segments: Beats,
    launch_id: int,
    check: Callable[[Descriptor], None],
    work: Callable[[Descriptor], None],
) -> Beats:
    """Work through the segments until one is refused; return the status buffer."""
    status = np.full(segments.shape, STATUS_FILL, dtype=np.uint8)
    spec_hash = spec.digest()[:HASH_BYTES]
    for index in range(segments.shape[0]):
        tokens, error = 0, ErrorCode.NONE
        try:
            descriptor = Descriptor.unpack(segments[index : index + 1])
            check(descriptor)
        except LaunchError as refusal:
            error = refusal.code
        else:
            work(descriptor)
            tokens = descriptor.tokens
        status[index] = StatusBeat(spec_hash, launch_id, tokens, error).pack()[0]
        if error is not ErrorCode.NONE:
            break
    return status


def _score_segment(
    spec: KernelSpec, launch: ScoreLaunch, descriptor: Descriptor, scores: Beats
) -> None:
    if descriptor.tokens == 0:
        return
    scope, queries = _scope(launch.scope, spec)
    shape = _as_stored(spec)
    if spec.key_mode is KeyMode.FP16:
        keys = _code_rows(launch.shadow, descriptor.shadow, launch.statistics, descriptor, shape)
    else:
        keys = _read_shadow(launch.shadow, descriptor, shape)
    # The offsets are in the addends already.
    none = np.zeros(offset_count(shape, scope), dtype=np.int64)
    # Positions are unsigned 64 bit; tuples hold their low bits.
    first_position = descriptor.base_position % WINDOW_TOKENS
    start = descriptor.score
    for number in range(queries):
        block = descriptor.query + number * query_beats(shape)
        aligned = aligned_products(_read_query(launch.queries, block, shape), keys, shape)
        codes = score_codes(aligned, none, keys.invalid, shape, scope)
        for tuples in make_tuples(codes, first_position):
            array = pack_score_array(tuples)
            _part(scores, start, array.shape[0], "scores")[:] = array
            start += descriptor.score_stride


def _make_segment(
    spec: KernelSpec, launch: ShadowLaunch, descriptor: Descriptor, shadow: Beats
) -> None:
    if descriptor.tokens == 0:
        return
    shape = _as_stored(spec)
    keys = _code_rows(launch.rows, descriptor.query, launch.statistics, descriptor, shape)
    segment = np.zeros((shape.segment_beats, BEAT_BYTES), dtype=np.uint8)
    write_codes(segment, 0, keys, shape)
    beats = shadow_beats(descriptor.tokens, shape)
    _part(shadow, descriptor.shadow, beats, "shadow")[:] = segment[:beats]


def _scope(number: int, spec: KernelSpec) -> tuple[Scope, int]:
    found = scope_of(number, spec.queries)
    if found is None:
        message = f"scope is {number}: no scope, or more queries than {spec.queries}"
        raise LaunchError(ErrorCode.DESCRIPTOR, message)
    return found


def _as_stored(spec: KernelSpec) -> KernelSpec:
    """Return the spec whose heads are as wide as in memory: to a kernel padding is channels too."""
    return replace(spec, head_dim=spec.padded_head_dim)


def _read_query(queries: Beats, start: int, spec: KernelSpec) -> QueryCodes:
    sizes = (4 * spec.scored_heads, spec.scored_heads, spec.scored_heads * spec.padded_head_dim)
    block = _part(queries, start, sum(beat_count(size) for size in sizes), "queries").copy()
    # Kernels do not look at spare bytes, so they may hold anything.
    first = 0
    for size in sizes:
        block[first : first + beat_count(size)].reshape(-1)[size:] = 0
        first += beat_count(size)
    query = QueryBlock.unpack(block, spec)
    return QueryCodes(query.codes, query.exponents, query.addends)


def _read_shadow(shadow: Beats, descriptor: Descriptor, spec: KernelSpec) -> KeyCodes:
    beats = shadow_beats(descriptor.tokens, spec)
    segment = np.zeros((spec.segment_beats, BEAT_BYTES), dtype=np.uint8)
    segment[:beats] = _part(shadow, descriptor.shadow, beats, "shadow")
    return read_codes(segment, 0, descriptor.tokens, spec)


def _code_rows(
    rows: Beats, start: int, statistics: Beats, descriptor: Descriptor, spec: KernelSpec
) -> KeyCodes:
    """Code the keys of a segment's rows with its statistics block."""
    values = spec.kv_heads * spec.padded_head_dim
    words = _part(statistics, descriptor.statistics, beat_count(4 * values), "statistics")
    key_beats = beat_count(FP16_BYTES * values)
    keys = np.zeros((descriptor.tokens, key_beats, BEAT_BYTES), dtype=np.uint8)
    for token in range(descriptor.tokens):
        keys[token] = _part(rows, start + token * descriptor.row_stride, key_beats, "rows")
    halves = keys.reshape(descriptor.tokens, -1).view("<u2")[:, :values].astype(np.uint16)
    shape = (descriptor.tokens, spec.kv_heads, spec.padded_head_dim)
    return encode_keys(halves.reshape(shape), unpack_statistics(words, spec), spec.key_mode)


def _part(buffer: Beats, start: int, beats: int, name: str) -> Beats:
    """Return a view of some beats of a buffer."""
    if start + beats > buffer.shape[0]:
        raise ValueError(
            f"beats {start}..{start + beats - 1} do not lie in {name} of {buffer.shape[0]} beats"
        )
    return buffer[start : start + beats]
