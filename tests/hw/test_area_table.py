# SPDX-License-Identifier: Apache-2.0
"""The table of areas: which kernels it has, and that stored counts are of today's sources."""

import json
import re
from dataclasses import replace

import pytest

from hillinfer_hw.area_table import area_cases, mark_of, stale, stored_area, stored_line
from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.rtl_files import RTL
from hillinfer_hw.synth import Area
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import PRESETS

STORED = json.loads((RTL / "baselines.json").read_text())
CASES = {case.name: case for case in area_cases(list(PRESETS))}
RESULTS = ROOT / "docs" / "results" / "kernels.md"
KERNEL = re.compile(r"`(score_tokens|make_shadow)`, (FP16|INT[248])(?:, `(\w+)`)?")
TITLES = {
    "SmolLM2-135M": "smollm2-135m",
    "Qwen2.5-0.5B": "qwen2.5-0.5b",
    "OPT-2.7B": "opt-2.7b",
    "Phi-3-mini": "phi-3-mini",
    "Llama-3.1-8B": "llama-3.1-8b",
    "OPT-6.7B": "opt-6.7b",
    "LLaMA-13B": "llama-13b",
    "Gemma-2B": "gemma-2b",
}
AREA = Area(1000, 2000, 32, 9.5, 0)
FOUR = "score_tokens llama-3.1-8b int4 weight_sum 4 queries"
ONE = "score_tokens llama-3.1-8b int4 weight_sum"


def test_every_kernel_is_stored_and_of_todays_sources():
    """A change of a source without `tools/synth.py --stale --update-baselines` shows."""
    assert {*STORED} == {*CASES}
    assert [told for case in CASES.values() if (told := stale(case, STORED))] == []


def test_counts_come_back_as_they_were_stored():
    line = stored_line(CASES[ONE], AREA)
    assert stored_area(line) == AREA
    assert stale(CASES[ONE], {ONE: line}) is None


def test_counts_of_other_sources_are_told():
    line = stored_line(CASES[ONE], AREA)
    assert stale(CASES[ONE], {}) == f"{ONE}: no baseline"
    unmarked = {key: count for key, count in line.items() if key != "sources"}
    for other in (unmarked, line | {"sources": CASES[FOUR].mark()}):
        assert "counted of other sources" in stale(CASES[ONE], {ONE: other})


def mark_with_another(name, folder):
    """The mark of a kernel one of whose modules has a line more."""
    whole = CASES[ONE]
    files = whole.modules()
    copy = folder / files[name].name
    copy.write_text(files[name].read_text() + "// Other.\n")
    return mark_of(whole.part, files | {name: copy}, whole.parameters)


@pytest.mark.parametrize("changed", ["axi_read", "dot_planes", "fifo", "score_tokens"])
def test_a_change_anywhere_below_a_kernel_is_another_mark(changed, tmp_path):
    assert mark_with_another(changed, tmp_path) != CASES[ONE].mark()


@pytest.mark.parametrize("changed", ["shadow_core", "score_cores"])
def test_a_change_of_what_a_kernel_has_not_leaves_its_mark(changed, tmp_path):
    """The twin: what makes shadows, and what shares keys among several queries."""
    assert mark_with_another(changed, tmp_path) == CASES[ONE].mark()


def test_cores_differ_by_their_parameters():
    int4, int8 = (
        next(area_cases(["llama-3.1-8b"], [mode], [Rule.RAW_SUM], part="core"))
        for mode in (KeyMode.INT4, KeyMode.INT8)
    )
    assert (int4.part, int8.part) == ("score_core", "score_core")
    assert int4.mark() != int8.mark()
    assert int4.mark() == replace(int4).mark()
    # Both rules of one shape, too.
    assert int4.mark() != replace(int4, rule=Rule.WEIGHT_SUM).mark()


def told_lines():
    """Lines of the page's tables: what the first cell says, and the other cells."""
    for line in RESULTS.read_text().splitlines():
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        yield title, cells


def told_shares():
    """LUT and DSP shares of `score_tokens`, in percent, by preset, mode and rule, as told."""
    columns = [f"{mode} {rule}" for mode in KeyMode for rule in (Rule.RAW_SUM, Rule.WEIGHT_SUM)]
    told = {}
    for title, cells in told_lines():
        if title in TITLES and len(cells) == len(columns) and all("/" in cell for cell in cells):
            for column, cell in zip(columns, cells, strict=True):
                told[f"score_tokens {TITLES[title]} {column}"] = cell
    return told


def test_shares_that_are_told_are_those_that_are_stored():
    told = told_shares()
    assert len(told) == 64
    for name, cell in told.items():
        area = stored_area(STORED[name])
        assert cell == f"{area.lut_share * 100:.1f} / {area.dsp_share * 100:.1f}", name


def test_counts_of_the_preset_with_goals_are_those_that_are_stored():
    told = {}
    for title, cells in told_lines():
        if len(cells) == 6 and (found := KERNEL.fullmatch(title)):
            kernel, mode, rule = found.groups()
            told[f"{kernel} llama-3.1-8b {mode.lower()} {rule or '-'}"] = cells
    assert len(told) == 11
    for name, (dsp, _, lut, _, ff, blocks) in told.items():
        area = stored_area(STORED[name])
        found = (f"{area.dsp_share * 100:.2f}", f"{area.lut_share * 100:.2f}", f"{area.ff:,}")
        assert (dsp, lut, ff, float(blocks)) == (*found, area.bram36), name
