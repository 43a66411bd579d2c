# SPDX-License-Identifier: Apache-2.0
"""The rendered C++ keeps the rules of DATAFLOW and pipelining; each rule catches a mutant."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from hillinfer_hw.csim_build import HLS, rendered_sources, stream_depths
from hillinfer_hw.hls_lint import lint
from hillinfer_hw.hls_loops import loop_markdown, loop_table, plain_headers
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import PRESETS, preset_spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "hls-kernels.md"


def kernels():
    for preset in PRESETS:
        for mode in KeyMode:
            for rule in Rule:
                yield "score_tokens", preset_spec(preset, mode, rule)
            if mode is not KeyMode.FP16:
                yield "make_shadow", preset_spec(preset, mode, Rule.WEIGHT_SUM)


def top_of(kernel, spec):
    return rendered_sources(kernel, spec)[f"{kernel}.cpp"]


@pytest.fixture(scope="module")
def shadow_top():
    return top_of("score_tokens", preset_spec("llama-3.1-8b", KeyMode.INT4, Rule.WEIGHT_SUM))


@pytest.fixture(scope="module")
def rows_top():
    return top_of("score_tokens", preset_spec("llama-3.1-8b", KeyMode.FP16, Rule.WEIGHT_SUM))


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_findings(preset):
    headers = plain_headers(HLS)
    for mode in KeyMode:
        for rule in Rule:
            spec = preset_spec(preset, mode, rule)
            assert lint(top_of("score_tokens", spec), headers) == []
        if mode is not KeyMode.FP16:
            assert lint(top_of("make_shadow", spec), headers) == []


SECOND_CONSUMER = """    PROCESS(split_shadow(to_split, keys, exponent_beats, code_beats));
    PROCESS(split_shadow(to_split, keys, exponent_beats, code_beats));
"""
TOP_MUTANTS = {
    "second consumer": (
        r"    PROCESS\(split_shadow\(.*\n",
        SECOND_CONSUMER,
        r"stream keys has the producers \['read_keys'\] and the consumers "
        r"\['split_shadow', 'split_shadow'\]",
    ),
    "no producer": (r"    PROCESS\(read_keys\(.*\n", "", r"stream keys has the producers \[\]"),
    "no depth": (r"#pragma HLS STREAM variable=sums .*\n", "", "stream sums has no STREAM pragma"),
    "backwards": (
        r"(    PROCESS\(read_keys.*\n)((?:.*\n)*?)(    PROCESS\(dot_shadow)",
        r"\2\1\3",
        "stream keys flows backwards",
    ),
    "no bundle": (r"#pragma HLS INTERFACE m_axi port=queries .*\n", "", "queries has no m_axi"),
    "other bundle": (r"port=status bundle=gmem2", "port=status bundle=gmem1", "gmem1 is shared"),
    "shared bursts": (
        r"port=status bundle=gmem2",
        "port=status bundle=gmem0",
        "shadow uses manual bursts, so no other port may share gmem0",
    ),
    "no register": (r"#pragma .* s_axilite port=scope\n", "", "scope has no s_axilite"),
    "no chain": (r"#pragma .* ap_ctrl_chain.*\n", "", "lacks INTERFACE ap_ctrl_chain"),
    "no dataflow": (r"#pragma HLS DATAFLOW\n", "", "not one DATAFLOW"),
    "work in the region": (
        r"(    PROCESS\(read_keys)",
        r"    for (uint32_t i = 0; i < segment_count; ++i)\n\1",
        "holds more than streams and processes",
    ),
}
HEADER_MUTANTS = {
    "dataflow in a loop": (
        "split.h",
        r"(        Beat beat;\n)",
        r"#pragma HLS DATAFLOW\n\1",
        "DATAFLOW below the top",
    ),
    "not a sum": (
        "fetch.h",
        r"queries\[d.query \+ b\]",
        "queries[d.query + 2 * b]",
        r"queries\[d.query \+ 2 \* b\] is not a sum",
    ),
    "every second beat": (
        "fetch.h",
        r"queries\[d.query \+ b\]",
        "queries[d.query + b + b]",
        "fetch_query_block says linear and uses memory scattered",
    ),
    "a place that moves": (
        "write_scores.h",
        r"scores\[start \+ b\] = score_beats.read\(\);",
        "scores[done + b] = score_beats.read(); done += c.stride;",
        "write_block_beats says linear and uses memory scattered",
    ),
    "a beat left out": (
        "write_scores.h",
        r"scores\[start \+ b\] =",
        "if (b != c.stride) scores[start + b] =",
        "write_block_beats says linear and uses memory scattered",
    ),
    "scattered and silent": (
        "write_scores.h",
        r" *// access: scattered.*\n",
        "",
        r"write_array_beats does not say how it uses memory \(\['scattered'\]\)",
    ),
    "linear taken for scattered": (
        "write_scores.h",
        r"scores\[place\]",
        "scores[start + b]",
        "write_array_beats says scattered and uses memory linear",
    ),
    "a request before the beat": (
        "read_keys.h",
        r"(        if \(takes\) \{(?:.*\n){3}        \}\n)(        if \(requests\) \{(?:.*\n){5})",
        r"\2\1",
        "memory must be read before it is requested",
    ),
    "a loop per segment": (
        "split.h",
        r"        Beat beat;\n",
        """        Beat beat;
        split_beats:
            // recurrence: none
            while (left != 0) {
#pragma HLS PIPELINE II=1
                --left;
            }
""",
        "split_shadow: 2 loops; without a pointer a process is one pipelined loop",
    ),
    "a stall for a command": (
        "split.h",
        r"if \(commands.read_nb\(c\)\) \{",
        "c = commands.read(); {",
        "the pipeline stalls for its next input in commands",
    ),
    "a stall for a beat": (
        "split.h",
        r"\} else if \(keys.read_nb\(beat\)\) \{",
        "} else { beat = keys.read();",
        "the pipeline stalls for its next input in keys",
    ),
    "a style by default": (
        "split.h",
        r"II=1 style=stp",
        "II=1",
        "the pipeline does not say that it stalls for room only",
    ),
    "free running and polling": (
        "split.h",
        r"II=1 style=stp",
        "II=1 style=frp",
        r"split_shadow: style=frp and read_nb do not go together \(HLS 200-1964\)",
    ),
    "flushing and polling": (
        "split.h",
        r"II=2 style=stp",
        "II=2 style=flp",
        r"spread_exponents: style=flp and read_nb do not go together",
    ),
    "a register as one number": (
        "score.h",
        r"(    bool has_sum = false;)",
        r"#pragma HLS AGGREGATE variable=coming_sum\n\1",
        "score_tiles: coming_sum is AGGREGATEd and no memory",
    ),
    "a place in a word": (
        "score.h",
        r"align\(sum\[i\]\[r\],",
        "align(coming_sum.sum[part * PART_TOKENS + u][r],",
        "score_tiles: the place part . PART_TOKENS . u chooses in the word coming_sum",
    ),
    "a round that may meet its own write": (
        "dot.h",
        r"#pragma HLS DEPENDENCE variable=held type=intra .*\n",
        "",
        "dot_shadow: memory held of two halves lacks DEPENDENCE type=intra dependent=false",
    ),
    "a distance that is not told": (
        "score.h",
        r"#pragma HLS DEPENDENCE variable=held type=inter .*\n",
        "",
        "score_tiles: memory held of two halves lacks DEPENDENCE type=inter direction=RAW",
    ),
    "an addition per head": (
        "score.h",
        r"terms \+= ScoreUnit::term\(log_weight\);",
        "total[i] = ScoreUnit::add(total[i], ScoreUnit::term(log_weight));",
        "score_tiles: more than one addition a round in the recurrence of total",
    ),
    "two slices one after the other": (
        "dot.h",
        r"before \+ of_this_head;",
        "before + low[0][r] + high[0][r];",
        "dot_rows: more than one addition a round in the recurrence of partial",
    ),
    "a place over two steps": (
        "cast.h",
        r"slice \+ 2;",
        "slice + 1 + 1;",
        "centre_rows: more than one addition a round in the recurrence of slice",
    ),
    "no label": ("split.h", r" *split_rounds:\n", "", "neither a label nor UNROLL"),
    "no II": (
        "split.h",
        r"(split_rounds:(?:.*\n)*?)#pragma HLS PIPELINE II=1 style=stp\n",
        r"\1",
        "split_rounds has no PIPELINE",
    ),
    "no recurrence": (
        "dot.h",
        r"// recurrence: partial sums of a tile.*",
        "// sums",
        "dot_rounds does not state its recurrence",
    ),
    "fields apart": (
        "dot.h",
        r"#pragma HLS AGGREGATE variable=held\n",
        "",
        "memory held is not AGGREGATEd",
    ),
    "floating point": ("score.h", r"int part = 0;", "float part = 0;", "float has no place"),
    "reads and writes": (
        "split.h",
        r"code_beats.write\(beat\);",
        "code_beats.write(beat); code_beats.read();",
        "must either read or write code_beats",
    ),
}


@pytest.mark.parametrize("name", TOP_MUTANTS)
def test_a_mutant_of_the_top_is_caught(name, shadow_top):
    pattern, replacement, finding = TOP_MUTANTS[name]
    mutant, count = re.subn(pattern, replacement, shadow_top)
    assert count == 1
    assert any(re.search(finding, line) for line in lint(mutant, plain_headers(HLS)))


@pytest.mark.parametrize("name", HEADER_MUTANTS)
def test_a_mutant_of_a_header_is_caught(name, shadow_top, rows_top):
    file, pattern, replacement, finding = HEADER_MUTANTS[name]
    headers = plain_headers(HLS)
    headers[file], count = re.subn(pattern, replacement, headers[file], count=1)
    assert count == 1
    top = rows_top if file in ("cast.h",) or "dot_rows" in finding else shadow_top
    assert any(re.search(finding, line) for line in lint(top, headers))


def test_exponents_of_a_whole_group_fit_their_fifo():
    """A group's exponents come before its first code, so a shallower FIFO could deadlock."""
    for kernel, spec in kernels():
        depths = stream_depths(top_of(kernel, spec))
        if "exponent_beats" in depths:
            assert depths["exponent_beats"] >= spec.kv_heads


# A process writes its streams in different stages of its pipeline (test_skew.py simulates them).
STAGES = 32


def centred_margin(spec, depth):
    """Stages that an exponent may lag behind its head's last beat before the two deadlock.

    Without a lag, half-beat heads of 80 channels need two places (test_csim.py): a third beat waits
    in a register of the process behind.
    """
    slices = spec.padded_head_dim // 16
    return depth - (slices + 1) // 2 + 1


def test_centred_beats_wait_for_an_exponent_that_comes_stages_later():
    found = 0
    for kernel, spec in kernels():
        depths = stream_depths(top_of(kernel, spec))
        if "centred" in depths:
            assert centred_margin(spec, depths["centred"]) >= STAGES
            # The twin: twice the beats of a head are not enough.
            assert centred_margin(spec, spec.padded_head_dim // 8) < STAGES
            found += 1
    # Rows in either rule, and three shadows.
    assert found == 5 * len(PRESETS)


def test_only_loops_that_wait_anyway_have_an_interval_above_one():
    slow = {loop.label for _, loop in loop_table(plain_headers(HLS)) if (loop.interval or 1) > 1}
    assert slow == {"spread_rounds", "gather_rounds", "join_rounds"}


def test_the_document_holds_the_loop_table():
    table = loop_markdown(plain_headers(HLS))
    assert table in DOCUMENT.read_text(encoding="utf-8"), (
        f"the table in {DOCUMENT.name} is old; `PYTHONPATH=sw_model:tools python -m "
        f"hillinfer_hw.hls_lint` prints the new one"
    )
