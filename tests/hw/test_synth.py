# SPDX-License-Identifier: Apache-2.0
"""Area estimates: counting, baselines, and a small unit through the real tool."""

import subprocess
from dataclasses import replace

import pytest
from needed_tools import needs_yosys

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.synth import (
    Area,
    SynthRow,
    above_goals,
    compare,
    count_cells,
    expected_dsp,
    synthesise,
)
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle

AREA = Area(1000, 2000, 32, 9.5, 0)


def test_cells_are_counted_by_what_they_take():
    cells = {"LUT6": 10, "SRL16E": 3, "RAM32M16": 2, "FDRE": 7, "FDSE": 1, "CARRY4": 9}
    cells |= {"DSP48E2": 4, "RAMB36E2": 5, "RAMB18E2": 3, "URAM288": 2}
    assert count_cells(cells) == Area(10 + 3 + 16, 8, 4, 6.5, 2)


def test_an_unknown_cell_is_not_left_out():
    with pytest.raises(ValueError, match="NEWCELL"):
        count_cells({"LUT6": 1, "NEWCELL": 1})


def row(area):
    return SynthRow("llama-3.1-8b", "int8", "raw_sum", "score_core", area)


def stored(area):
    return {row(area).name: vars(area)}


def test_the_same_counts_differ_in_nothing():
    assert compare([row(AREA)], stored(AREA)) == []
    assert compare([row(Area(1019, 2000, 32, 9.5, 0))], stored(AREA)) == []


@pytest.mark.parametrize(
    ("area", "field"),
    [
        (Area(1021, 2000, 32, 9.5, 0), "lut"),
        (Area(979, 2000, 32, 9.5, 0), "lut"),
        (Area(1000, 2061, 32, 9.5, 0), "ff"),
        (Area(1000, 2000, 33, 9.5, 0), "dsp"),
        (Area(1000, 2000, 32, 10.0, 0), "bram36"),
    ],
)
def test_a_count_beyond_its_tolerance_is_named(area, field):
    (found,) = compare([row(area)], stored(AREA))
    assert f": {field} " in found


def test_a_row_without_a_baseline_is_named():
    assert compare([row(AREA)], {}) == [f"{row(AREA).name}: no baseline"]


def test_a_kernel_above_its_goal_is_named():
    # 2 % of 522,720 LUTs are 10,454; 2 % of 1,968 DSP blocks are 39.
    assert above_goals([row(Area(10454, 9000, 39, 0, 0))]) == []
    assert above_goals([row(Area(10455, 9000, 40, 0, 0))]) == [
        "score_core llama-3.1-8b int8 raw_sum: 2.03% of the DSPs, the goal is 2%",
        "score_core llama-3.1-8b int8 raw_sum: 2.00% of the LUTs, the goal is 2%",
    ]
    # Of four queries, with a LUT above 20 %.
    four = SynthRow("llama-3.1-8b", "int4", "weight_sum", "score_tokens", AREA, 4)
    assert four.name == "score_tokens llama-3.1-8b int4 weight_sum 4 queries"
    assert above_goals([replace(four, area=Area(104544, 9000, 0, 0, 0))]) == []
    assert above_goals([replace(four, area=Area(104545, 9000, 0, 0, 0))]) == [
        "score_tokens llama-3.1-8b int4 weight_sum 4 queries: 20.00% of the LUTs, the goal is 20%"
    ]
    other = SynthRow("llama-13b", "int8", "raw_sum", "score_core", Area(99999, 9000, 400, 0, 0))
    assert above_goals([other]) == []


@pytest.mark.parametrize(
    ("mode", "rule", "style", "blocks"),
    [
        (KeyMode.INT8, Rule.RAW_SUM, ProductStyle.DSP, 32),
        (KeyMode.INT8, Rule.WEIGHT_SUM, ProductStyle.DSP, 128),
        (KeyMode.FP16, Rule.RAW_SUM, ProductStyle.DSP, 32),
        (KeyMode.FP16, Rule.WEIGHT_SUM, ProductStyle.DSP, 64),
        (KeyMode.INT4, Rule.WEIGHT_SUM, ProductStyle.LUT, 0),
    ],
)
def test_two_products_share_a_multiplier(mode, rule, style, blocks):
    spec = KernelSpec(128, 8, 4, mode, rule, product_style=style)
    assert expected_dsp(spec, "score_tokens") == blocks
    assert expected_dsp(replace(spec, queries=3), "score_tokens") == 3 * blocks


@needs_yosys
def test_sources_that_yosys_refuses_are_an_error_each_time(tmp_path):
    source = tmp_path / "broken.sv"
    source.write_text("module broken (input a;\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            synthesise("broken", [source], {})
        assert "ERROR" in refused.value.stderr
        assert "broken.sv:1" in refused.value.stderr


@pytest.mark.kernels
@needs_yosys
def test_a_packed_multiplier_is_one_block():
    unit = ROOT / "hw" / "rtl" / "pair_product.sv"
    paired = synthesise("pair_product", [unit], {"PAIRED": 1})
    assert paired.dsp == 1
    assert paired.lut < 20
