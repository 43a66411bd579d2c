# SPDX-License-Identifier: Apache-2.0
"""The modelled gain of several queries a pass, beside what simulated RTL has shown."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.hardware_spec import most_queries
from hillinfer_model.kernel_figures import launch_segments
from hillinfer_model.kernel_spec import MOST_QUERIES
from hillinfer_model.launch_shape import SegmentShape, WriteBurst, key_beats, score_writes
from hillinfer_model.memory_model import IDEAL, MEMORIES, REALISTIC
from hillinfer_model.pass_figures import pass_figures
from hillinfer_model.presets import preset_spec

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "kernels.md"
# Scope, of another preset its name, memory, segments, cycles of one query and of four, and gain.
ROW = re.compile(
    r"\| (layer|kv_head)(?:, (\S+))? \| (realistic|ideal) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| "
    r"([\d.]+) \| [\d.]+ \|"
)
LLAMA = preset_spec("llama-3.1-8b", KeyMode.INT4, Rule.WEIGHT_SUM)


def simulated():
    return [
        match.groups() for match in map(ROW.fullmatch, RESULTS.read_text().splitlines()) if match
    ]


def test_the_page_has_rows_of_both_scopes_and_memories():
    assert {row[0] for row in simulated()} == {*Scope}
    assert {row[2] for row in simulated()} == {*MEMORIES}


@pytest.mark.parametrize("row", simulated(), ids=lambda row: "-".join(filter(None, row)))
def test_the_model_meets_the_simulation(row):
    scope, preset, memory, segments, one, four, gain = row
    preset = (preset or "llama-3.1-8b").lower()
    spec = preset_spec(preset, KeyMode.INT4, Rule.WEIGHT_SUM)
    shapes = launch_segments(int(segments) * spec.segment_tokens, spec)
    found = pass_figures(spec, Scope(scope), shapes, MEMORIES[memory], 4)
    assert found.cycles_of_one == pytest.approx(int(one.replace(",", "")), rel=0.02)
    assert found.cycles == pytest.approx(int(four.replace(",", "")), rel=0.02)
    assert found.gain == pytest.approx(float(gain), rel=0.015)
    # The twin: three queries gain something else.
    other = pass_figures(spec, Scope(scope), shapes, MEMORIES[memory], 3)
    assert other.gain != pytest.approx(float(gain), rel=0.015)


def test_the_limit_is_that_of_the_beats():
    shapes = launch_segments(16 * 1024, LLAMA)
    found = pass_figures(LLAMA, Scope.LAYER, shapes, REALISTIC, 4)
    # Of a segment: 8,320 key beats, a descriptor, 67 beats of a query block and 64 of scores, and
    # a status beat.
    keys, own, rest = 1024 * 520 // 64, 67 + 64, 2
    expected = 4 * (keys + own + rest) / (keys + 4 * own + rest)
    assert found.limit == pytest.approx(expected, rel=1e-3)
    assert found.gain < 1.01 * found.limit
    assert pass_figures(LLAMA, Scope.LAYER, shapes, IDEAL, 4).limit == 4
    single = pass_figures(LLAMA, Scope.LAYER, shapes, REALISTIC, 1)
    assert (single.gain, single.limit) == (1, 1)


def test_beats_of_several_queries_are_bursts_of_their_own():
    first = [WriteBurst(key_beats(16, LLAMA), 1)] * 3
    last = [WriteBurst(key_beats(20, LLAMA), 1)] * 3
    assert [*score_writes(SegmentShape(20), LLAMA, Scope.LAYER, 3)] == first + last
    by_head = [*score_writes(SegmentShape(20), LLAMA, Scope.KV_HEAD, 3)]
    assert len(by_head) == 2 * 3 * LLAMA.kv_heads


def test_as_many_queries_as_fit():
    assert most_queries(LLAMA) == MOST_QUERIES
    # Query codes and statistics of FP16 rows are there once per query.
    assert most_queries(replace(LLAMA, key_mode=KeyMode.FP16)) == 2
