# SPDX-License-Identifier: Apache-2.0
"""Faults in the RTL, each tried in a proof about its unit or in the simulation of a part.

A proof takes seconds. A part is built for each fault: a datapath alone, or a small kernel.
"""

from __future__ import annotations

from mutants.mutant import Mutant

_RTL = "hw/rtl"
_PROOFS = "tests/hw/test_proofs.py::test_holds_for_all_inputs"
_CORES = "tests/hw/test_score_core.py::test_every_tuple_is_golden"
_SCORE_CORE = (f"{_CORES}[64-3-3-int8-weight_sum-dsp]",)
_SHADOW_CORE = ("tests/hw/test_shadow_core.py::test_every_beat_is_golden[80-3-int4]",)
_LATE_ANSWERS = ("tests/hw/test_rtl_kernel.py::test_no_memory_changes_a_byte[late answers-layer]",)

_AREAS = "tools/hillinfer_hw/area_table.py"
_AREA_TESTS = "tests/hw/test_area_table.py"

RTL: tuple[Mutant, ...] = (
    Mutant(
        "rtl-align-corner",
        "An aligned product of exactly -2^23 is not limited.",
        f"{_RTL}/align_unit.sv",
        "    else if (fine[24:1] == 24'h800000) clamped <= -24'sd8388607;\n",
        "",
        (
            f"{_PROOFS}[aligned product]",
            "tests/hw/test_executions.py::test_scores_are_equal[rtl-half-beat-int4-weight_sum-layer-saturated_products]",
        ),
    ),
    Mutant(
        "rtl-align-rounds-down",
        "Alignment drops the bits behind the point and does not round.",
        f"{_RTL}/align_unit.sv",
        "half <= fine[0] && !overflow5;",
        "half <= 1'b0;",
        (f"{_PROOFS}[aligned product]",),
    ),
    Mutant(
        "rtl-align-not-limited",
        "An aligned product above the limit keeps its low bits.",
        f"{_RTL}/align_unit.sv",
        "overflow4 <= |beyond;",
        "overflow4 <= 1'b0;",
        (f"{_PROOFS}[aligned product]",),
    ),
    Mutant(
        "rtl-weight-limit",
        "Weights are limited from 2^32 on, not from 2^24.",
        f"{_RTL}/weight_unit.sv",
        "(|integer_part[23:5] || integer_part[4:3] == 2'b11);",
        "|integer_part[23:5];",
        (f"{_PROOFS}[weight]",),
    ),
    Mutant(
        "rtl-sum-not-limited",
        "A sum of weights is not limited to 48 bits.",
        f"{_RTL}/score_code.sv",
        "start <= (|value[WIDTH-1:48]) ? 48'hFFFF_FFFF_FFFF : value[47:0];",
        "start <= value[47:0];",
        (f"{_PROOFS}[score code of a weight sum is its definition]",),
    ),
    Mutant(
        "rtl-accumulator-not-cleared",
        "The sum of a KV head starts from that of the head before.",
        f"{_RTL}/head_sum.sv",
        "total <= (first ? 23'sd0 : total) + 23'(part);",
        "total <= total + 23'(part);",
        _SCORE_CORE,
    ),
    Mutant(
        "rtl-total-not-cleared",
        "The total of a token starts from that of the tile before.",
        f"{_RTL}/score_tile.sv",
        "{bad_base1, base1} <= sum_clear ? '0 : kept;",
        "{bad_base1, base1} <= kept;",
        _SCORE_CORE,
    ),
    Mutant(
        "rtl-invalid-lost",
        "A token is valid where the key of its last KV head is.",
        f"{_RTL}/score_tile.sv",
        "bad <= (first1 ? bad_base1 : bad) || bad_total1;",
        "bad <= bad_total1;",
        _SCORE_CORE,
    ),
    Mutant(
        "rtl-segment-end-late",
        "A segment whose last tile is full goes on for a tile.",
        f"{_RTL}/tile_sequencer.sv",
        "last_tile <= 32'(left) <= 2 * TILE_TOKENS;",
        "last_tile <= 32'(left) < 2 * TILE_TOKENS;",
        _SCORE_CORE,
    ),
    Mutant(
        "rtl-stale-tuples",
        "Tuples behind the last token hold positions.",
        f"{_RTL}/tuple_rows.sv",
        "(i > 32'(sent_end)) ? 32'd0",
        "1'b0 ? 32'd0",
        _SCORE_CORE,
    ),
    Mutant(
        "rtl-ties-up",
        "A key code at a tie rounds away from zero though the one below is even.",
        f"{_RTL}/round_lane.sv",
        "fine[0] && (sticky3 || fine[1]) && !(&fine[W:1]);",
        "fine[0] && !(&fine[W:1]);",
        _SHADOW_CORE,
    ),
    Mutant(
        "rtl-code-not-limited",
        "A key code that rounds up past the largest one wraps.",
        f"{_RTL}/round_lane.sv",
        "fine[0] && (sticky3 || fine[1]) && !(&fine[W:1]);",
        "fine[0] && (sticky3 || fine[1]);",
        _SHADOW_CORE,
    ),
    Mutant(
        "rtl-nan-lost",
        "A NaN does not make its token invalid.",
        f"{_RTL}/head_cast.sv",
        "exponent12 <= {all[24], bit_length(all[23:SHIFT])};",
        "exponent12 <= {1'b0, bit_length(all[23:SHIFT])};",
        _SHADOW_CORE,
    ),
    Mutant(
        "rtl-stale-tile",
        "Padding tokens of a tile hold what an earlier tile left there.",
        f"{_RTL}/tile_pack.sv",
        "beat5 && (lane5 == 0 || 32'(lane5) == j);",
        "beat5 && 32'(lane5) == j;",
        _SHADOW_CORE,
    ),
    Mutant(
        "rtl-row-segment-end-late",
        "A segment of rows goes on for a row.",
        f"{_RTL}/row_sequencer.sv",
        "segment_end <= left == 2;",
        "segment_end <= left == 1;",
        _SHADOW_CORE,
    ),
    Mutant(
        "rtl-status-before-answers",
        "A status beat is written before the memory has answered for what it counts.",
        f"{_RTL}/writer.sv",
        """        .in_valid(done_valid && done_marked && !done_status && !done_error && !failed
            && !status_failed),
        .in_ready(unused_ready), .in_data({done_index, done_count}),
""",
        """        .in_valid(takes && block_ends),
        .in_ready(unused_ready), .in_data({index, count_next}),
""",
        _LATE_ANSWERS,
    ),
    Mutant(
        "rtl-status-left-out",
        "Of a segment's blocks only the last one has a status beat.",
        f"{_RTL}/writer.sv",
        "assign block_ends = beat_last || (unit_ends && last_unit);",
        "assign block_ends = beat_last;",
        _LATE_ANSWERS,
    ),
    Mutant(
        "area-of-the-top-alone",
        "What lies below a kernel's top is no part of its mark.",
        _AREAS,
        "return fingerprint([*sources_of(part, files),",
        "return fingerprint([*sources_of(part, files)[:1],",
        (f"{_AREA_TESTS}::test_a_change_anywhere_below_a_kernel_is_another_mark[fifo]",),
    ),
    Mutant(
        "area-of-any-parameters",
        "A core's parameters are no part of its mark.",
        _AREAS,
        "values = json.dumps(parameters, sort_keys=True)",
        'values = ""',
        (f"{_AREA_TESTS}::test_cores_differ_by_their_parameters",),
    ),
    Mutant(
        "area-without-a-mark",
        "Counts that were stored without a mark are taken for today's.",
        _AREAS,
        'if line.get("sources") != case.mark():',
        'if line.get("sources", case.mark()) != case.mark():',
        (f"{_AREA_TESTS}::test_counts_of_other_sources_are_told",),
    ),
)
