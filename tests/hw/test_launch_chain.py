# SPDX-License-Identifier: Apache-2.0
"""A sequence through make_shadow and score_tokens, against the golden model without bytes."""

from dataclasses import replace

import numpy as np
import pytest
from executions import EXECUTIONS, execution_of
from golden_inputs import random_keys, random_query
from launch_builder import (
    Rows,
    ScoreSegment,
    ShadowSegment,
    key_value_extra_beats,
    score_launch,
    shadow_launch,
)
from pairwise import pairwise
from recorded_launch import widened

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.golden import GoldenModel
from hillinfer_model.launch import ErrorCode, StatusBeat, make_query_block, unpack_score_array
from hillinfer_model.layout import read_codes, shadow_beats
from hillinfer_model.offsets import offsets
from hillinfer_model.presets import PRESETS, preset_spec
from hillinfer_model.query_codes import encode_query

ENTRIES = {entry.name: entry for entry in EXECUTIONS}


def rows_of(*shape_names):
    for name, entry in ENTRIES.items():
        shapes = [shape for shape in shape_names if shape in entry.presets]
        if not shapes:
            continue
        for shape, mode, rule, scope in pairwise([shapes, list(KeyMode), list(Rule), list(Scope)]):
            spec = (preset_spec if shape in PRESETS else entry.spec_of)(shape, mode, rule)
            # Where builds take long, `make test` has one rule of each mode here, too.
            marks = () if rule in entry.rules(shape, mode) else pytest.mark.kernels
            row_id = "-".join((name, shape, mode, rule, scope))
            yield pytest.param(name, spec, scope, id=row_id, marks=marks)


def scored_by_launches(name, spec, scope, keys, query, scaling):
    """Make the shadow by one launch and the scores by another: uint16 (sets, N)."""
    execution = execution_of(name)
    segments = GoldenModel(spec, scope).encode_sequence(keys)
    rows = [
        Rows(
            keys[own.base_position : own.base_position + own.codes.codes.shape[0]],
            own.statistics,
            key_value_extra_beats(spec),
        )
        for own in segments
    ]
    aligned, invalid = GoldenModel(spec, scope).aligned(query, scaling, segments)
    references = offsets(aligned, invalid, spec, scope)
    blocks = [
        make_query_block(
            encode_query(query, own.statistics, scaling, spec), references, spec, scope
        )
        for own in segments
    ]
    cast = spec.key_mode is KeyMode.FP16
    launch = score_launch(
        spec,
        scope,
        [
            ScoreSegment(own.base_position, row if cast else own.codes, block)
            for own, row, block in zip(segments, rows, blocks, strict=True)
        ],
    )
    if not cast:
        launch = with_made_shadow(execution, maker_spec(name, spec), segments, rows, launch)
    result = execution.score(spec, launch)
    return codes_of(spec, scope, launch, result)


def with_made_shadow(execution, spec, segments, rows, launch):
    """The launch with its shadow as `make_shadow` makes it from rows."""
    making = shadow_launch(
        spec,
        [ShadowSegment(own.base_position, row) for own, row in zip(segments, rows, strict=True)],
    )
    made = execution.make_shadow(spec, making).output
    shadow = np.zeros_like(launch.shadow)
    for index, row in enumerate(rows):
        source = Descriptor.unpack(making.segments[index : index + 1]).shadow
        target = Descriptor.unpack(launch.segments[index : index + 1]).shadow
        beats = shadow_beats(row.tokens, spec)
        shadow[target : target + beats] = made[source : source + beats]
        segment = np.zeros((spec.segment_beats, 64), dtype=np.uint8)
        segment[:beats] = made[source : source + beats]
        found = read_codes(segment, 0, row.tokens, spec)
        assert np.array_equal(found.codes, segments[index].codes.codes)
        assert np.array_equal(found.exponents, segments[index].codes.exponents)
    return replace(launch, shadow=shadow)


def codes_of(spec, scope, launch, result):
    """Score codes of a finished launch, after a look at positions and status beats."""
    columns = []
    for index in range(launch.segments.shape[0]):
        descriptor = Descriptor.unpack(launch.segments[index : index + 1])
        status = StatusBeat.unpack(result.status[index : index + 1])
        assert (status.tokens_complete, status.error) == (descriptor.tokens, ErrorCode.NONE)
        assert status.spec_hash == spec.digest()[:8]
        sets = 1 if scope is Scope.LAYER else spec.kv_heads
        beats = -(-descriptor.tokens // 16)
        positions = descriptor.base_position + np.arange(descriptor.tokens)
        rows = []
        for own in range(sets):
            start = descriptor.score + own * descriptor.score_stride
            tuples = unpack_score_array(result.output[start : start + beats], descriptor.tokens)
            assert np.array_equal(tuples & 0xFFFF, positions & 0xFFFF)
            rows.append(tuples >> 16)
        columns.append(np.stack(rows))
    return np.concatenate(columns, axis=1)


def maker_spec(name, spec):
    """The spec of a kernel that makes the shadows, which knows no rule.

    Where both rules are built it is of the first one, as in test_executions.py: one build less.
    """
    both = len(ENTRIES[name].rules(next(iter(PRESETS)), spec.key_mode)) > 1
    return replace(spec, rule=next(iter(Rule))) if both else spec


def assert_equal_and_twin(name, spec, scope, keys, query, scaling):
    expected = GoldenModel(spec, scope).score(
        query, scaling, GoldenModel(spec, scope).encode_sequence(keys)
    )
    found = scored_by_launches(name, spec, scope, keys, query, scaling)
    assert np.array_equal(found, expected)
    assert np.unique(expected).size > 40
    # The sign bits of one query head.
    wrong = query.copy()
    wrong[0] *= -1
    found = scored_by_launches(name, spec, scope, keys, wrong, scaling)
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "spec", "scope"), [*rows_of("smollm2-135m", "gemma-2b", "half-beat")]
)
def test_a_sequence_of_launches_is_golden(name, spec, scope):
    keys = random_keys(3, spec.segment_tokens + 77, spec.kv_heads, spec.head_dim)
    # A NaN and an infinity: one token that ranks last, and one that saturates.
    keys[5, 0, 3], keys[9, 0, 4] = 0x7E00, 0xFC00
    query = random_query(4, spec.query_heads, spec.head_dim) / 8
    assert_equal_and_twin(name, spec, scope, keys, query, spec.head_dim**-0.5)


@pytest.mark.model
@pytest.mark.xdist_group("real-model-launches")
@pytest.mark.parametrize(("name", "spec", "scope"), [*rows_of("smollm2-135m", "half-beat")])
def test_recorded_keys_are_golden(name, spec, scope, recorded_layer):
    keys, query, scaling = recorded_layer
    # Of the recorded model's shape they are as recorded.
    keys = widened(keys, spec.kv_heads, spec.head_dim)
    query = widened(query[np.newaxis], spec.query_heads, spec.head_dim)[0]
    assert_equal_and_twin(name, spec, scope, keys, query, scaling)
