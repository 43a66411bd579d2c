# SPDX-License-Identifier: Apache-2.0
"""Counts the LUTs on the longest path of a mapped netlist: how deep logic is between registers.

No open tool knows the delays of UltraScale+. Depth is no clock, but a path of few LUTs is what a
clock of 300 MHz needs, and a path that grows shows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer_hw.rtl_files import RTL
from hillinfer_hw.synth import KEPT, run_yosys

MOST_LUTS = 6
# Modules with parameters of kernels that their own are not: the writer of `make_shadow`, FP16 rows.
VARIANTS = ("writer KIND=2", "score_core CODE_BITS=8 MODE=1 STYLE=0")
_MODULE = re.compile(r"^module (\w+)", re.MULTILINE)

# Cells that a signal passes, with what they count; others hold it until the next clock. A DSP block
# counts as one that holds it: its registers are left to the tool that has them.
_LUT = re.compile(r"LUT[1-6]|INV")
_CARRY = re.compile(r"CARRY[48]")
_MUX = re.compile(r"MUXF[789]")
# Memories in LUTs are read without a clock: from their address to their output.
_READ = re.compile(r"SRL.*|RAM(?:32|64|128|256|512).*")
_ADDRESS = re.compile(r"A\d*|DPRA\d*|ADDR[A-H]?\d*")


@dataclass(frozen=True, order=True)
class Levels:
    """The longest path of a netlist.

    Parameters
    ----------
    luts
        LUTs on it, memories in LUTs included.
    carries
        Carry cells on it.
    """

    luts: int
    carries: int


class PathError(ValueError):
    """A netlist whose paths cannot be counted; the message says why."""


def modules() -> dict[str, Path]:
    """Return the file of every module that is no template."""
    return {
        name: path
        for path in sorted(RTL.glob("*.sv"))
        for name in _MODULE.findall(path.read_text(encoding="utf-8"))
    }


def sources_of(module: str, files: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Return name and text of the files that a module is built of, its own first.

    Parameters
    ----------
    module
        Its name, or one of `VARIANTS`.
    files
        The file of every module.
    """
    found: dict[str, str] = {}
    waiting = [module.split()[0]]
    while waiting:
        path = files[waiting.pop()]
        if path.name in found:
            continue
        found[path.name] = text = path.read_text(encoding="utf-8")
        waiting += [
            name for name in files if re.search(rf"^ +{name} (?:#\(|\w+ \()", text, re.MULTILINE)
        ]
    return list(found.items())


def fingerprint(sources: Iterable[tuple[str, str]]) -> str:
    """Return what tells a module's sources from others: 16 hexadecimal digits."""
    whole = "\0".join(f"{name}\0{text}" for name, text in sorted(sources))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def levels_of(module: str, sources: list[tuple[str, str]]) -> Levels:
    """Map a module, with its own parameters, to UltraScale+ cells and count its longest path.

    Parameters
    ----------
    module
        Its name; behind it other values of parameters, as in `VARIANTS`.
    sources
        Name and text of its files.

    Raises
    ------
    FileNotFoundError
        Where Yosys is not installed.
    subprocess.CalledProcessError
        Where it refuses the sources.
    PathError
        Where logic goes round in a circle.
    """
    top, *others = module.split()
    settings = "".join(f" -chparam {one.replace('=', ' ')}" for one in others)
    # Repeated units are mapped once, as for the area, and put in their places afterwards.
    kept = " ".join(f"*{name}*" for name in (*KEPT, "score_core"))
    script = (
        f"read_verilog -sv {' '.join(name for name, _ in sources)}; hierarchy -top {top}{settings};"
        f" setattr -mod -set keep_hierarchy 1 {kept};"
        " synth_xilinx -family xcup -flatten -noiopad;"
        " setattr -mod -unset keep_hierarchy *; flatten; write_json netlist.json"
    )
    netlist = json.loads((run_yosys(script, sources) / "netlist.json").read_text())
    # With other parameters its name is made up.
    top_module = next(one for one in netlist["modules"].values() if "top" in one["attributes"])
    return deepest(top_module)


def deepest(module: Mapping[str, Any]) -> Levels:
    """Return the longest path of a flat module of a netlist that yosys wrote as JSON.

    Of paths with equally many LUTs it is the one with most carry cells.

    Raises
    ------
    PathError
        Where logic goes round in a circle.
    """
    drivers: dict[int, _Cell] = {}
    for cell in _passed(module["cells"]):
        for bit in cell.outputs:
            drivers[bit] = cell
    depths: dict[int, Levels] = {}
    for cell in drivers.values():
        _walk(cell, drivers, depths)
    return max(depths.values(), default=Levels(0, 0))


@dataclass(frozen=True, eq=False)
class _Cell:
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    luts: int
    carries: int


def _passed(cells: Mapping[str, Mapping[str, Any]]) -> Iterator[_Cell]:
    """Yield the cells that a signal passes."""
    for cell in cells.values():
        kind, directions = cell["type"], cell["port_directions"]
        lut, carry, read = (bool(one.fullmatch(kind)) for one in (_LUT, _CARRY, _READ))
        if not (lut or carry or read or _MUX.fullmatch(kind)):
            continue
        ports = cell["connections"]
        inputs = [
            bit
            for port, bits in ports.items()
            if directions[port] == "input" and (not read or _ADDRESS.fullmatch(port))
            for bit in bits
        ]
        outputs = [
            bit for port, bits in ports.items() if directions[port] == "output" for bit in bits
        ]
        if _signals(outputs):
            yield _Cell(_signals(inputs), _signals(outputs), int(lut or read), int(carry))


def _signals(bits: Iterable[int | str]) -> tuple[int, ...]:
    """Return the bits that are no constants."""
    return tuple(bit for bit in bits if isinstance(bit, int))


def _walk(cell: _Cell, drivers: Mapping[int, _Cell], depths: dict[int, Levels]) -> None:
    """Fill in the depths of a cell's outputs and of all before it, without recursion."""
    stack, under_way = [cell], set[int]()
    while stack:
        one = stack[-1]
        if one.outputs[0] in depths:
            stack.pop()
            continue
        before = [drivers[bit] for bit in one.inputs if bit in drivers]
        missing = [other for other in before if other.outputs[0] not in depths]
        if missing:
            if id(one) in under_way:
                raise PathError(f"logic goes round in a circle through bit {one.outputs[0]}")
            under_way.add(id(one))
            stack += missing
            continue
        under_way.discard(id(one))
        deepest_before = max((depths[other.outputs[0]] for other in before), default=Levels(0, 0))
        found = Levels(deepest_before.luts + one.luts, deepest_before.carries + one.carries)
        depths.update(dict.fromkeys(one.outputs, found))
        stack.pop()
