# SPDX-License-Identifier: Apache-2.0
"""An install without the native library: it says so at once, and how to get it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hillinfer
from hillinfer.native.library import HOW_TO_BUILD, LIBRARY

COMMAND = "import hillinfer_command; hillinfer_command.main()"
# Both in one process, which takes seconds to import what a model is read with.
ATTACH_AND_DOCTOR = """
import sys
import transformers
import hillinfer
from hillinfer.errors import HillInferError
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
try:
    hillinfer.attach(model)
except HillInferError as error:
    print(type(error).__name__, error)
print(model.config._attn_implementation)
sys.argv[1:] = ["doctor", "--cold-dir", sys.argv[2], "--json"]
"""
LOADED = """
import hillinfer.native.library
print(hillinfer.native.library.__file__)
hillinfer.native.library.native_library()
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The packages as an install brings them, compiled where they are, but for the library."""
    place = tmp_path_factory.mktemp("install")
    host, model = LIBRARY.parents[2], LIBRARY.parents[3] / "sw_model"
    without = shutil.ignore_patterns(LIBRARY.name, "*.pyc.*")
    shutil.copytree(host / "hillinfer", place / "hillinfer", ignore=without)
    shutil.copytree(model / "hillinfer_model", place / "hillinfer_model", ignore=without)
    shutil.copy(host / "hillinfer_command.py", place)
    return place


def run(place, program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("device", ["nvme", "golden"])
def test_generate_ends_with_one_line_before_anything_is_read(bare, tmp_path, device):
    done = run(
        bare, COMMAND, "generate", "--model", tmp_path / "no-model", "--prompt", "Hello",
        "--device", device, "--cold-dir", tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("hillinfer: error: the native library is not built: ")
    assert HOW_TO_BUILD in line


def test_attach_refuses_and_doctor_says_that_it_is_missing_and_how_to_get_it(
    bare, tiny_folder, tmp_path
):
    done = run(bare, ATTACH_AND_DOCTOR + COMMAND, tiny_folder, tmp_path)
    assert done.returncode == 0, done.stderr
    refused, left, told = done.stdout.split("\n", 2)
    assert refused.startswith("NativeError the native library is not built: ")
    assert HOW_TO_BUILD in refused
    # The model is as it was.
    assert left == "sdpa"
    told = json.loads(told)
    assert not told["ready"]
    (finding,) = (one for one in told["findings"] if one["name"] == "native library")
    assert finding["verdict"] == "missing"
    assert HOW_TO_BUILD in finding["fix"]


def test_with_the_library_the_same_copy_works(bare, tmp_path):
    """The twin: nothing but the library is missing above."""
    whole = shutil.copytree(bare, tmp_path / "whole")
    shutil.copy(LIBRARY, whole / LIBRARY.relative_to(Path(hillinfer.__file__).parents[1]))
    for place, status in ((whole, 0), (bare, 1)):
        done = run(place, LOADED)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith(str(place))
