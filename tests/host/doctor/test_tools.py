# SPDX-License-Identifier: Apache-2.0
"""Optional tools, on the path and as Python's packages and modules."""

import json
import os
import subprocess
import sys

import pytest

from hillinfer.doctor.finding import Verdict

# What is imported already stays; whatever else a tool may be is looked for in one folder.
LOOK = """
import dataclasses, json, sys
from hillinfer.doctor.finding import tool_findings

sys.path[:] = sys.argv[1:]
print(json.dumps([dataclasses.asdict(tool) for tool in tool_findings()]))
"""


@pytest.fixture
def tools(tmp_path):
    """Looks for the tools with only two folders to look in: programs and modules."""
    programs, modules = tmp_path / "programs", tmp_path / "modules"
    programs.mkdir()
    modules.mkdir()

    def look():
        own = {"PATH": str(programs), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", LOOK, str(modules)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | own
        )
        return {tool["name"]: tool for tool in json.loads(done.stdout)}

    return look


def place(tool):
    """Return where a tool was found, None where it was not."""
    return tool["found"] if tool["verdict"] == Verdict.OK else None


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_every_tool_that_is_not_there_has_a_purpose_and_a_fix(tools):
    found = tools().values()
    assert [place(tool) for tool in found] == [None] * len(found)
    assert all(tool["found"].startswith("needed for ") and tool["fix"] for tool in found)


def test_what_the_emulated_card_is_built_with_is_looked_for(tools):
    assert tools().keys() >= {"g++", "protoc", "Verilator", "pyxrt"}


def test_a_program_on_the_path(tools, tmp_path):
    own = program(tmp_path / "programs" / "protoc")
    assert place(tools()["protoc"]) == str(own)
    own.chmod(0o644)
    assert place(tools()["protoc"]) is None


def test_verilator_comes_as_a_package_too(tools, tmp_path):
    packaged = tmp_path / "modules" / "verilator" / "bin" / "verilator"
    packaged.parent.mkdir(parents=True)
    assert place(tools()["Verilator"]) is None
    own = program(tmp_path / "programs" / "verilator")
    assert place(tools()["Verilator"]) == str(own)
    program(packaged)
    assert place(tools()["Verilator"]) == str(packaged)


def test_pyxrt_is_a_module_and_no_mere_folder(tools, tmp_path):
    (tmp_path / "modules" / "pyxrt").mkdir()
    assert place(tools()["pyxrt"]) is None
    module = tmp_path / "modules" / "pyxrt.py"
    module.write_text("")
    assert place(tools()["pyxrt"]) == str(module)
