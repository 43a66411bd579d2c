# SPDX-License-Identifier: Apache-2.0
"""Modules placed and routed for an ECP5: the wrapper, reports, what is stored of every module."""

import json
import re

import pytest
from needed_tools import needs_yosys_and_nextpnr

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.logic_levels import fingerprint, modules, sources_of
from hillinfer_hw.place_and_route import (
    Placed,
    PlaceError,
    Port,
    place_and_route,
    placed_of,
    ports_of,
    surrounded,
)
from hillinfer_hw.rtl_files import RTL

STORED = json.loads((RTL / "frequencies.json").read_text())
PAGE = ROOT / "docs" / "results" / "kernels.md"
ROW = re.compile(r"\| `(\w+)` \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|")
# Whole datapaths: larger than the device, or half an hour each.
LEFT_OUT = {"score_core", "score_cores", "shadow_core"}
# Placed in every run: seconds.
QUICK = "pulse_line"


def report(*megahertz):
    """A report of the tool, with a clock for each frequency."""
    used = {"TRELLIS_COMB": {"used": 7, "available": 9}, "TRELLIS_FF": {"used": 5, "available": 9}}
    clocks = {str(number): {"achieved": one} for number, one in enumerate(megahertz)}
    return {"fmax": clocks, "utilization": used}


def test_the_slowest_clock_counts():
    assert placed_of(report(123.44, 200.0)) == Placed(123.4, 7, 5)
    assert placed_of(report(123.46, 120.0)) == Placed(120.0, 7, 5)


def test_a_module_without_paths_has_no_frequency():
    with pytest.raises(PlaceError, match="no path"):
        placed_of(report())


def test_every_port_lies_between_registers():
    ports = [Port("clk", True, 1), Port("a", True, 3), Port("b", True, 2), Port("c", False, 4)]
    text = surrounded("unit", ports)
    assert "unit alone" in text
    for connection in (".clk(clk)", ".a(feed[0+:3])", ".b(feed[3+:2])", ".c(made[0+:4])"):
        assert connection in text
    # The twin: a wider port moves what comes behind it.
    wider = surrounded("unit", [ports[0], Port("a", True, 4), *ports[2:]])
    assert ".b(feed[4+:2])" in wider


def test_every_module_is_stored_as_it_is():
    """A change of a source without `tools/place_and_route.py --update` shows."""
    files = modules()
    assert {*STORED} == {*files} - LEFT_OUT
    for name in STORED:
        assert STORED[name]["sources"] == fingerprint(sources_of(name, files)), name


def test_the_page_tells_every_module_as_it_is_stored():
    told = {}
    for line in PAGE.read_text().splitlines():
        if row := ROW.fullmatch(line):
            name, megahertz, *counts = row.groups()
            told[name] = (float(megahertz), *(int(count.replace(",", "")) for count in counts))
    assert told == {
        name: (line["megahertz"], line["luts"], line["registers"]) for name, line in STORED.items()
    }


@needs_yosys_and_nextpnr
def test_widths_are_those_of_a_modules_own_parameters():
    ports = {port.name: port for port in ports_of("queue", sources_of("queue", modules()))}
    assert ports["in_data"] == Port("in_data", True, 8)
    assert ports["out_valid"] == Port("out_valid", False, 1)


@needs_yosys_and_nextpnr
def test_what_is_stored_is_what_is_placed():
    found = place_and_route(QUICK, sources_of(QUICK, modules()))
    stored = STORED[QUICK]
    assert (found.megahertz, found.luts) == (stored["megahertz"], stored["luts"])


@needs_yosys_and_nextpnr
def test_a_longer_path_is_slower():
    """The twin: many levels of logic where a line of registers has none."""
    text = (
        "module chain (input logic clk, input logic [31:0] in, output logic out);\n"
        "  logic [31:0] x;\n  assign x[0] = in[0];\n  genvar i;\n"
        "  generate for (i = 1; i < 32; i = i + 1) begin : g\n"
        "    assign x[i] = x[i-1] & (in[i] ^ in[31-i] | x[i-1] ^ in[i-1]);\n  end endgenerate\n"
        "  always_ff @(posedge clk) out <= x[31];\nendmodule\n"
    )
    assert place_and_route("chain", [("chain.sv", text)]).megahertz < STORED[QUICK]["megahertz"] / 2
