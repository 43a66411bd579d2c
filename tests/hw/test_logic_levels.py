# SPDX-License-Identifier: Apache-2.0
"""LUTs between registers: counted on made-up netlists, and stored for every module of the RTL."""

import json

import pytest
from needed_tools import needs_yosys

from hillinfer_hw.logic_levels import (
    MOST_LUTS,
    VARIANTS,
    Levels,
    PathError,
    deepest,
    fingerprint,
    levels_of,
    modules,
    sources_of,
)
from hillinfer_hw.rtl_files import RTL

STORED = json.loads((RTL / "levels.json").read_text())
# Mapped in every run: seconds. The others are in `make synth`; what is stored is theirs as long as
# nobody changes a source.
QUICK = "queue"


def cell(kind, inputs, outputs):
    """A cell of a netlist, with bits by port or in a port of its own."""
    inputs = inputs if isinstance(inputs, dict) else {"I": inputs}
    directions = {**dict.fromkeys(inputs, "input"), "O": "output"}
    return {"type": kind, "port_directions": directions, "connections": {**inputs, "O": outputs}}


def netlist(*cells):
    return {"cells": {str(number): one for number, one in enumerate(cells)}}


def chain(length, kind="LUT3", first=0):
    return [cell(kind, [first + bit], [first + bit + 1]) for bit in range(length)]


def test_luts_on_the_longest_path_are_counted():
    assert deepest(netlist()) == Levels(0, 0)
    assert deepest(netlist(*chain(4), *chain(2, first=100))) == Levels(4, 0)
    # One more on the longer path shows, on the shorter one it does not.
    assert deepest(netlist(*chain(5), *chain(2, first=100))) == Levels(5, 0)
    assert deepest(netlist(*chain(4), *chain(3, first=100))) == Levels(4, 0)


@pytest.mark.parametrize("kind", ["FDRE", "DSP48E2", "RAMB36E2"])
def test_what_has_a_clock_ends_a_path(kind):
    parts = [*chain(3), cell(kind, [3], [4]), *chain(2, first=4)]
    assert deepest(netlist(*parts)) == Levels(3, 0)


def test_carries_and_wide_multiplexers_are_passed():
    parts = [*chain(2), cell("CARRY4", [2, "0"], [3]), cell("MUXF7", [3], [4]), *chain(1, first=4)]
    assert deepest(netlist(*parts)) == Levels(3, 1)


def test_a_memory_in_luts_is_read_by_its_address_only():
    # What is written may depend on what was read: that is no circle.
    ram = cell("RAM32M", {"ADDRA": [3], "DIA": [10], "WCLK": [50]}, [9])
    assert deepest(netlist(*chain(3), ram, *chain(1, first=9))) == Levels(5, 0)


def test_a_circle_is_refused():
    with pytest.raises(PathError, match="circle"):
        deepest(netlist(cell("LUT2", [2], [1]), cell("LUT2", [1], [2])))


def test_every_module_is_stored_as_it_is():
    """A change of a source without `tools/levels.py --update` shows, in what includes it too."""
    files = modules()
    assert {*STORED} == {*files, *VARIANTS}
    for name in STORED:
        assert STORED[name]["sources"] == fingerprint(sources_of(name, files)), name
    before = sources_of("axi_read", files)
    changed = [(name, text.replace("DEPTH", "ROOM", 1)) for name, text in before]
    assert fingerprint(changed) != fingerprint(before)


@needs_yosys
def test_other_parameters_are_mapped():
    """The twin of the stored rows: a queue of another depth has another longest path."""
    sources = sources_of(f"{QUICK} DEPTH=64", modules())
    assert sources == sources_of(QUICK, modules())
    stored = Levels(STORED[QUICK]["luts"], STORED[QUICK]["carries"])
    assert levels_of(f"{QUICK} DEPTH=64", sources) > stored


def test_no_module_is_deeper_than_the_goal():
    assert not {name: row["luts"] for name, row in STORED.items() if row["luts"] > MOST_LUTS}


@needs_yosys
def test_what_is_stored_is_what_yosys_maps():
    found = levels_of(QUICK, sources_of(QUICK, modules()))
    assert (found.luts, found.carries) == (STORED[QUICK]["luts"], STORED[QUICK]["carries"])
