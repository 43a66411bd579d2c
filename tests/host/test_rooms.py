# SPDX-License-Identifier: Apache-2.0
"""Which way imports go between packages."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A package's folder, and the packages of this project that it may import.
MAY_IMPORT = {
    "sw_model/hillinfer_model": {"hillinfer_model"},
    "host/hillinfer": {"hillinfer", "hillinfer_model"},
    "tools/hillinfer_bench": {"hillinfer_bench", "hillinfer", "hillinfer_model"},
    "plugins/hillinfer_pynq/hillinfer_pynq": {"hillinfer_pynq", "hillinfer", "hillinfer_model"},
    "tools/hillinfer_hw": {"hillinfer_hw", "hillinfer", "hillinfer_model", "hillinfer_pynq"},
}
OWN = ("hillinfer", "hillinfer_bench", "hillinfer_hw", "hillinfer_model", "hillinfer_pynq")


def imported(source):
    """Return the packages of this project that a module imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name.split(".")[0] for name in names} & {*OWN}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_packages_import_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 5
    wrong = {
        str(file.relative_to(ROOT)): sorted(imported(file.read_text()) - MAY_IMPORT[folder])
        for file in files
    }
    assert {file: names for file, names in wrong.items() if names} == {}


def test_an_import_is_seen_wherever_it_is():
    assert imported("def f():\n    from hillinfer_bench.rivals import rival\n") == {
        "hillinfer_bench"
    }
    assert imported("import hillinfer_hw.synth as s\nimport numpy\n") == {"hillinfer_hw"}
