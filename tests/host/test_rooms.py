# SPDX-License-Identifier: Apache-2.0
"""Which way imports go between packages and between rooms, and how large a room may be."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A package's folder, and the packages of this project that it may import.
MAY_IMPORT = {
    "sw_model/hillinfer_model": {"hillinfer_model"},
    "host/hillinfer": {"hillinfer", "hillinfer_model"},
    "tools/hillinfer_bench": {"hillinfer_bench", "hillinfer", "hillinfer_model"},
    "tools/hillinfer_hw": {"hillinfer_hw", "hillinfer", "hillinfer_model"},
}
OWN = ("hillinfer", "hillinfer_bench", "hillinfer_hw", "hillinfer_model")
PRODUCT = ROOT / "host" / "hillinfer"
# A room that one person holds in mind.
MOST_MODULES = 12
MOST_LINES = 500


@cache
def imported(source):
    """Return every module that a module imports, wherever it does, of whatever package."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # A module may be imported as a name of its package.
            names |= {f"{node.module}.{one.name}" for one in node.names}
    return names


def imported_packages(source):
    """Return the packages of this project that a module imports."""
    return {name.split(".")[0] for name in imported(source)} & {*OWN}


def rooms():
    """Return the rooms of the product in the order that CONTRIBUTING.md prints them, lowest first.

    A room is a folder without the rooms inside it, a module that lies beside the folders, or one
    inside a folder that has a row of its own. Its name is its path below `hillinfer`.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^\| `host/hillinfer/([\w/]+?)(?:\.py|/)` \|", text, re.MULTILINE)


def room_of(name, order):
    """Return the innermost room of a dotted name, None where it is the package `hillinfer`."""
    parts = name.split(".")[1:]
    outward = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((room for room in outward if room in order), None)


def upward(room, source, order):
    """Return what a module of a room imports from rooms that are not below it.

    The last room may come in by the front door, the package itself.
    """
    allowed = [*order[: order.index(room) + 1], *([None] if room == order[-1] else [])]
    names = {name for name in imported(source) if name.split(".")[0] == "hillinfer"}
    return sorted(name for name in names if room_of(name, order) not in allowed)


def modules(room, order):
    """Return the files of a room, without those of rooms inside it."""
    files = [*(PRODUCT / room).rglob("*.py"), *PRODUCT.glob(f"{room}.py")]
    dotted = {
        file: ".".join(("hillinfer", *file.relative_to(PRODUCT).with_suffix("").parts))
        for file in files
    }
    return sorted(file for file, name in dotted.items() if room_of(name, order) == room)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_packages_import_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 5
    wrong = {
        str(file.relative_to(ROOT)): sorted(
            imported_packages(file.read_text()) - MAY_IMPORT[folder]
        )
        for file in files
    }
    assert {file: names for file, names in wrong.items() if names} == {}


def test_contributing_prints_every_room():
    printed = rooms()
    folders = {path.parent.relative_to(PRODUCT) for path in PRODUCT.rglob("__init__.py")}
    beside = {path.relative_to(PRODUCT).with_suffix("") for path in PRODUCT.glob("*.py")}
    there = {path.as_posix() for path in folders | beside} - {".", "__init__"}
    # A module inside a folder may have a row, and then it is there.
    inside = {room for room in printed if "/" in room and (PRODUCT / f"{room}.py").exists()}
    assert len(printed) == len({*printed})
    assert {*printed} - inside == there


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_only_what_is_printed_before_them(room):
    order = rooms()
    files = modules(room, order)
    assert files
    wrong = {file.name: upward(room, file.read_text(), order) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_an_import_of_a_room_above_is_seen():
    order = ["errors", "drive", "kv"]
    assert upward("drive", "from hillinfer.errors import HillInferError\n", order) == []
    assert upward("drive", "def f():\n    from hillinfer.kv.rows import Rows\n", order) == [
        "hillinfer.kv.rows.Rows"
    ]
    assert upward("drive", "from hillinfer import kv\n", order) == ["hillinfer.kv"]
    assert upward("drive", "from hillinfer import attach\n", order) == ["hillinfer.attach"]
    assert upward("kv", "from hillinfer import attach\n", order) == []


def test_an_import_of_a_room_inside_another_is_seen():
    order = ["errors", "devices", "devices/xrt", "devices/opening"]
    outer = "from hillinfer.devices.device import ScoringDevice\n"
    inner = "from hillinfer.devices.xrt.device import XrtDevice\n"
    last = "def f():\n    from hillinfer.devices import opening\n"
    assert upward("devices", outer, order) == []
    assert upward("devices", inner, order) == ["hillinfer.devices.xrt.device.XrtDevice"]
    assert upward("devices/xrt", outer + inner, order) == []
    assert upward("devices/xrt", last, order) == ["hillinfer.devices.opening"]
    assert upward("devices/opening", outer + inner + last, order) == []


def test_a_module_belongs_to_one_room():
    order = rooms()
    owned = [file for room in order for file in modules(room, order)]
    assert len(owned) == len({*owned})
    assert {*PRODUCT.rglob("*.py")} - {*owned} == {PRODUCT / "__init__.py"}
    assert PRODUCT / "devices" / "xrt" / "device.py" not in modules("devices", order)


@pytest.mark.parametrize("folder", [path.parent for path in PRODUCT.rglob("__init__.py")])
def test_a_room_is_small_enough_to_hold_in_mind(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    lines = {path.name: len(path.read_text().splitlines()) for path in modules}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_an_import_is_seen_wherever_it_is():
    assert imported_packages("def f():\n    from hillinfer_bench.rivals import rival\n") == {
        "hillinfer_bench"
    }
    assert imported_packages("import hillinfer_hw.synth as s\nimport numpy\n") == {"hillinfer_hw"}
