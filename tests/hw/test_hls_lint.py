# SPDX-License-Identifier: Apache-2.0
"""The rendered C++ keeps the rules of DATAFLOW and pipelining; each rule catches a mutant."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from hillinfer_hw.csim_build import HLS, rendered_sources, stream_depths
from hillinfer_hw.hls_lint import lint, loop_markdown, loop_table, plain_headers
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
        r"stream keys has the producers \['read_shadow'\] and the consumers "
        r"\['split_shadow', 'split_shadow'\]",
    ),
    "no producer": (r"    PROCESS\(read_shadow\(.*\n", "", r"stream keys has the producers \[\]"),
    "no depth": (r"#pragma HLS STREAM variable=sums .*\n", "", "stream sums has no STREAM pragma"),
    "backwards": (
        r"(    PROCESS\(read_shadow.*\n)((?:.*\n)*?)(    PROCESS\(dot_shadow)",
        r"\2\1\3",
        "stream keys flows backwards",
    ),
    "no bundle": (r"#pragma HLS INTERFACE m_axi port=queries .*\n", "", "queries has no m_axi"),
    "other bundle": (r"port=status bundle=gmem2", "port=status bundle=gmem0", "gmem0 is shared"),
    "no register": (r"#pragma .* s_axilite port=scope\n", "", "scope has no s_axilite"),
    "no chain": (r"#pragma .* ap_ctrl_chain.*\n", "", "lacks INTERFACE ap_ctrl_chain"),
    "no dataflow": (r"#pragma HLS DATAFLOW\n", "", "not one DATAFLOW"),
    "work in the region": (
        r"(    PROCESS\(read_shadow)",
        r"    for (uint32_t i = 0; i < segment_count; ++i)\n\1",
        "holds more than streams and processes",
    ),
}
HEADER_MUTANTS = {
    "dataflow in a loop": (
        "split.h",
        r"(const uint32_t beats = shadow_beats)",
        r"#pragma HLS DATAFLOW\n\1",
        "DATAFLOW below the top",
    ),
    "not linear": (
        "read_keys.h",
        r"shadow\[c.source \+ b\]",
        "shadow[c.source + 2 * b]",
        r"shadow\[c.source \+ 2 \* b\] is not a sum",
    ),
    "no label": ("split.h", r" *split_beats:\n", "", "neither a label nor UNROLL"),
    "no II": (
        "split.h",
        r"(split_beats:(?:.*\n)*?)#pragma HLS PIPELINE II=1\n",
        r"\1",
        "split_beats has no PIPELINE",
    ),
    "no recurrence": (
        "dot.h",
        r"// recurrence: partial sums of a tile.*",
        "// sums",
        "dot_beats does not state its recurrence",
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
def test_a_mutant_of_a_header_is_caught(name, shadow_top):
    file, pattern, replacement, finding = HEADER_MUTANTS[name]
    headers = plain_headers(HLS)
    headers[file], count = re.subn(pattern, replacement, headers[file], count=1)
    assert count == 1
    assert any(re.search(finding, line) for line in lint(shadow_top, headers))


def test_exponents_of_a_whole_group_fit_their_fifo():
    """A group's exponents come before its first code, so a shallower FIFO could deadlock."""
    for kernel, spec in kernels():
        depths = stream_depths(top_of(kernel, spec))
        if "exponent_beats" in depths:
            assert depths["exponent_beats"] >= spec.kv_heads
        if "centred" in depths:
            slices = spec.padded_head_dim // 16
            assert depths["centred"] >= (slices + 1) // 2 + 1


def test_only_loops_that_wait_anyway_have_an_interval_above_one():
    slow = {row.label for row in loop_table(plain_headers(HLS)) if (row.interval or 1) > 1}
    assert slow == {"spread_words", "gather_words", "join_words"}


def test_the_document_holds_the_loop_table():
    table = loop_markdown(plain_headers(HLS))
    assert table in DOCUMENT.read_text(encoding="utf-8"), (
        f"the table in {DOCUMENT.name} is old; `PYTHONPATH=sw_model:tools python -m "
        f"hillinfer_hw.hls_lint` prints the new one"
    )
