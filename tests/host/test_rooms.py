# SPDX-License-Identifier: Apache-2.0
"""Which way imports go between packages and between rooms, and how large a room may be."""

import ast
import re
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

    A room is a folder, or a module that lies beside the folders.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^\| `host/hillinfer/([\w.]+?)(?:\.py|/)` \|", text, re.MULTILINE)


def room_of(name):
    """Return the room of a dotted name below `hillinfer`, None where it is the package itself."""
    parts = name.split(".")[1:]
    return parts[0] if parts and parts[0] in rooms() else None


def upward(room, source, order):
    """Return what a module of a room imports from rooms that are not below it.

    The last room may come in by the front door, the package itself.
    """
    allowed = [*order[: order.index(room) + 1], *([None] if room == order[-1] else [])]
    names = {name for name in imported(source) if name.split(".")[0] == "hillinfer"}
    return sorted(name for name in names if room_of(name) not in allowed)


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
    there = {
        path.stem
        for path in PRODUCT.iterdir()
        if path.name != "__init__.py"
        and (path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists()))
    }
    assert sorted(rooms()) == sorted(there)


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_only_what_is_printed_before_them(room):
    order = rooms()
    folder = PRODUCT / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PRODUCT / f"{room}.py"]
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
