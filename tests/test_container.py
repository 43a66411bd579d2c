# SPDX-License-Identifier: Apache-2.0
"""The container file says what is so: `make lint` gives it to hadolint, which knows no project."""

import json
import re
import tomllib
from pathlib import Path

from hillinfer.cli.parsing import STORE_VARIABLE
from hillinfer.serve.rules import KEY_VARIABLE, ServerRules

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(name):
    joined = re.sub(r"\\\n\s*", " ", TEXT)
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def test_it_serves_where_it_says():
    assert instructions("EXPOSE") == [str(ServerRules().port)]
    (command,) = instructions("CMD")
    assert json.loads(command)[:3] == ["serve", "--host", "0.0.0.0"]
    assert f":{ServerRules().port}/health" in TEXT


def test_extras_and_variables_are_those_of_the_project():
    (extras,) = re.findall(r"WHEEL\}\[([\w,-]+)\]", TEXT)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert STORE_VARIABLE in TEXT
    assert KEY_VARIABLE in TEXT


def test_its_options_are_those_of_the_command():
    import inspect

    from hillinfer.cli.serving.serve import serve

    (command,) = instructions("CMD")
    options = [one[2:].replace("-", "_") for one in json.loads(command) if one.startswith("--")]
    assert set(options) <= inspect.signature(serve).parameters.keys()


def test_it_is_of_a_python_that_the_project_runs_on_and_of_no_root():
    assert PROJECT["requires-python"] == ">=3.11"
    images = {one.split(" ")[0] for one in instructions("FROM")}
    assert images == {"python:3.11-slim-bookworm"}
    assert instructions("USER") == ["1000"]


def test_what_it_copies_and_calls_is_there():
    for source in ("constraints.txt", "tools/build_native.py"):
        assert source in TEXT
        assert (ROOT / source).exists()
