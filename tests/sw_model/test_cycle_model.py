# SPDX-License-Identifier: Apache-2.0
"""The cycle model where its answer can be worked out without it."""

from dataclasses import replace

import pytest

from hillinfer_model import kernel_timing as timing
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.cycle_model import score_cycles, shadow_cycles
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_shape import (
    SegmentShape,
    WriteBurst,
    code_beats,
    key_beats,
    key_value_row_beats,
    query_beats,
    row_bursts,
    score_writes,
    shadow_bursts,
    shadow_writes,
    statistics_beats,
)
from hillinfer_model.memory_model import IDEAL, REALISTIC, MemoryModel
from hillinfer_model.presets import PRESETS, preset_spec

LLAMA = preset_spec("llama-3.1-8b", KeyMode.INT4, Rule.WEIGHT_SUM)
SMOL_ROWS = preset_spec("smollm2-135m", KeyMode.FP16, Rule.RAW_SUM)
FULL = SegmentShape(1024)
SLOW = MemoryModel("slow", read_latency=(150, 150), write_latency=(50, 50))


def cycles(spec, segments, memory=IDEAL, scope=Scope.LAYER):
    return score_cycles(spec, scope, segments, memory)


# Memory


def test_beats_pass_between_refreshes():
    memory = replace(IDEAL, refresh=(100, 10))
    # Beats pass in cycles 10..99 of each hundred.
    assert memory.beats_end(0, 1) == 11
    assert memory.beats_end(5, 1) == 11
    assert memory.beats_end(10, 90) == 100
    assert memory.beats_end(10, 91) == 111
    assert memory.beats_end(99, 2) == 111
    assert memory.beats_end(50, 50 + 90 + 1) == 211
    assert IDEAL.beats_end(7, 5) == 12
    assert REALISTIC.bus_share == pytest.approx(1 - 105 / 2340)


# Shapes, worked out by hand


def test_beats_of_a_launch():
    # INT4, 8 KV heads of 128: a group is 8 exponent beats and 8 tiles of 8 heads of 8 slices.
    assert key_beats(1024, LLAMA) == 16 * (8 + 512)
    assert code_beats(1024, LLAMA) == 16 * 512
    assert key_beats(9, LLAMA) == 8 + 2 * 64
    assert code_beats(9, LLAMA) == 2 * 64
    # 32 int32 are 2 beats, 32 int8 one, 32 heads of 128 codes 64.
    assert query_beats(LLAMA) == 2 + 1 + 64
    assert statistics_beats(LLAMA) == 64
    # 3 heads of 64 FP16 are 6 beats, K‖V 12.
    assert key_beats(10, SMOL_ROWS) == code_beats(10, SMOL_ROWS) == 60
    assert key_value_row_beats(SMOL_ROWS) == 12


def test_bursts_end_at_4_kib():
    assert [*shadow_bursts(SegmentShape(9, first_beat=60), LLAMA)] == [4, 64, 64, 4]
    assert [*row_bursts(SegmentShape(10, 6), SMOL_ROWS)] == [60]
    # Rows of 6 beats, 12 apart from beat 50: 50..55, 62..67, 74..79.
    assert [*row_bursts(SegmentShape(3, 12, 50), SMOL_ROWS)] == [6, 2, 4, 6]


def test_bursts_of_output():
    own = replace(LLAMA, block_tokens=256)
    # A score beat holds 16 tokens, a burst four of them; a block's end and a segment's close one.
    assert [*score_writes(SegmentShape(300), own, Scope.LAYER)] == [
        *(WriteBurst(key_beats(tokens, LLAMA), 4) for tokens in (64, 128, 192, 256)),
        WriteBurst(key_beats(300, LLAMA), 3),
    ]
    # Bursts end at multiples of four beats: addresses 62 and 63 are one, 74 and 75 another.
    shifted = [*score_writes(SegmentShape(300, output_beat=62), own, Scope.LAYER)]
    assert [one.beats for one in shifted] == [2, 4, 4, 4, 2, 2, 1]
    assert [one.after_beat for one in shifted] == [
        key_beats(tokens, LLAMA) for tokens in (32, 96, 160, 224, 256, 288, 300)
    ]
    ones = [*score_writes(SegmentShape(20), LLAMA, Scope.KV_HEAD)]
    assert (
        ones
        == [WriteBurst(key_beats(16, LLAMA), 1)] * 8 + [WriteBurst(key_beats(20, LLAMA), 1)] * 8
    )
    # INT8, one KV head of 64: exponent beat, then tiles of 4 tokens in 4 beats; rows of 2 beats.
    small = KernelSpec(64, 1, 1, key_mode=KeyMode.INT8)
    assert [*shadow_writes(SegmentShape(66), small)] == [
        WriteBurst(126 + 2, 63),
        WriteBurst(128, 1),
        WriteBurst(128, 1),
        WriteBurst(132, 4),
        WriteBurst(132, 1),
    ]


def test_written_beats_are_the_shadow():
    for spec in (LLAMA, KernelSpec(80, 3, 1, key_mode=KeyMode.INT2)):
        for tokens in (0, 1, 63, 64, 65, 1000):
            written = sum(one.beats for one in shadow_writes(SegmentShape(tokens), spec))
            assert written == key_beats(tokens, spec)


# Cycles


@pytest.mark.parametrize("mode", list(KeyMode))
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_further_segment_costs_its_beats_with_ideal_memory(preset, mode):
    spec = preset_spec(preset, mode, Rule.WEIGHT_SUM)
    few, more = (cycles(spec, [FULL] * count) for count in (4, 9))
    assert more.cycles - few.cycles == 5 * key_beats(1024, spec)
    assert more.beats == 9 * key_beats(1024, spec)
    assert more.beats_per_cycle > few.beats_per_cycle
    assert 0 < few.cycles - few.beats < 1200


def test_an_empty_launch_takes_its_first_steps_only():
    assert cycles(LLAMA, []).cycles < 50
    assert cycles(LLAMA, []).beats_per_cycle == 0
    assert cycles(LLAMA, [SegmentShape(0)] * 3).beats == 0
    assert cycles(LLAMA, [SegmentShape(0)] * 3).write_beats == 3


def test_the_queries_of_short_segments_cost_more_than_their_keys():
    count = 50
    found = cycles(LLAMA, [SegmentShape(8)] * count)
    loads = count * timing.query_load(LLAMA)
    assert found.beats == count * (8 + 64)
    # Between two loads the next descriptor is looked at and its blocks are asked for.
    assert loads < found.cycles < loads + 20 * count + 300


def test_refresh_and_other_beats_take_their_share_of_a_bus():
    found = cycles(LLAMA, [FULL] * 20, REALISTIC)
    # Scores 64 beats, status 1, descriptor 1, query 67 per segment.
    moved = 20 * (key_beats(1024, LLAMA) + 64 + 1 + 1 + 67)
    assert found.load_beats == 20 * 68
    assert found.write_beats == 20 * 65
    assert moved / REALISTIC.bus_share < found.cycles < 1.01 * moved / REALISTIC.bus_share + 1500


def test_short_rows_wait_for_open_bursts():
    # Sixteen bursts of 6 beats are open at once and one comes back every 1/16 of a round.
    segments = [SegmentShape(1024, row_stride=64)] * 8
    one_bus = cycles(SMOL_ROWS, segments, replace(SLOW, read_latency=(600, 600)))
    rounds = 8 * 1024 / 16
    assert one_bus.cycles == pytest.approx(rounds * 606, rel=0.03)
    # With little latency the bus is the limit again.
    assert cycles(SMOL_ROWS, segments, IDEAL).cycles == pytest.approx(8 * 6144, rel=0.01)


def test_latency_costs_a_long_launch_its_start_and_end_only():
    fast, slow = (cycles(LLAMA, [FULL] * 10, memory) for memory in (IDEAL, SLOW))
    # Descriptor and query block one after the other, then scores and status.
    assert slow.cycles - fast.cycles == pytest.approx(2 * 150 + 2 * 50, abs=40)


def test_heads_with_arrays_of_their_own_wait_for_open_writes():
    spec = preset_spec("opt-2.7b", KeyMode.INT2, Rule.WEIGHT_SUM)
    slow = replace(SLOW, write_latency=(400, 400))
    layer, heads = (cycles(spec, [FULL] * 4, slow, scope) for scope in Scope)
    # 32 heads of 64 beats a segment, sixteen of them open at a time.
    assert heads.cycles > 4 * 32 * 64 / 16 * 400 > 2 * layer.cycles


@pytest.mark.parametrize("mode", [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2])
def test_make_shadow_reads_a_beat_per_cycle(mode):
    spec = preset_spec("llama-3.1-8b", mode, Rule.WEIGHT_SUM)
    found = shadow_cycles(spec, [FULL] * 4, IDEAL)
    assert found.beats == found.code_beats == 4 * 1024 * 32
    assert found.write_beats == 4 * (spec.segment_beats + 1)
    assert found.beats < found.cycles < found.beats + 500
    shared = shadow_cycles(spec, [FULL] * 4, REALISTIC)
    moved = (found.beats + found.write_beats + found.load_beats) / REALISTIC.bus_share
    assert moved < shared.cycles < 1.02 * moved + 1500


def test_rows_have_no_shadow_to_make():
    with pytest.raises(ValueError, match="fp16"):
        shadow_cycles(SMOL_ROWS, [FULL], IDEAL)


def test_the_same_launch_takes_the_same_cycles():
    assert cycles(LLAMA, [FULL], REALISTIC) == cycles(LLAMA, [FULL], REALISTIC)
    assert cycles(LLAMA, [FULL], REALISTIC) != cycles(LLAMA, [SegmentShape(1008)], REALISTIC)
