# SPDX-License-Identifier: Apache-2.0
"""A native build that fails: in CI it ends `make setup`, elsewhere it says so and goes on."""

import shutil
import subprocess
from pathlib import Path

import pytest

import build_native

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
@pytest.mark.parametrize(("ci", "required"), [("1", True), ("", False)])
def test_ci_requires_the_library(ci, required, tmp_path):
    venv = tmp_path / "venv"
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", f"CI={ci}", f"VENV={venv}", f"{venv}/installed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = [one for one in printed.splitlines() if "tools/build_native.py" in one]
    assert ("--require" in line.split()) is required


@pytest.mark.parametrize("required", [True, False])
def test_a_required_build_that_fails_ends_in_an_error(required, monkeypatch, tmp_path, capsys):
    # A machine without a compiler.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    arguments = ["--require"] if required else []
    if required:
        with pytest.raises(SystemExit) as caught:
            build_native.main(arguments)
        assert caught.value.code == 1
    else:
        build_native.main(arguments)
    assert "not built" in capsys.readouterr().out
