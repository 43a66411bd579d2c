# SPDX-License-Identifier: Apache-2.0
"""`hillinfer doctor` and the small commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = """
import importlib.metadata, importlib.util, sys
HIDDEN = ("torch", "transformers", "safetensors")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
real_spec, real_version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name: None if name in HIDDEN else real_spec(name)
def version(name):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.metadata.version = version
from hillinfer.cli.main import main
main(sys.argv[1:])
"""


def findings_of(text):
    return {finding["name"]: finding for finding in json.loads(text)["findings"]}


def test_doctor_says_this_machine_is_ready(command, cold_dir):
    outcome = command("doctor", "--cold-dir", cold_dir)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].startswith("ready")
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert findings["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["torch"]["verdict"] == findings["transformers"]["verdict"] == "ok"
    assert str(cold_dir) in findings["cold directory"]["found"]
    assert findings.keys() >= {"processor", "memory", "GPU", "model smollm2-135m", "g++", "pyxrt"}


def test_doctor_names_the_fix_of_what_is_missing(command, tmp_path):
    outcome = command("doctor", "--cold-dir", tmp_path / "gone", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["ready"] is False
    finding = findings_of(outcome.out)["cold directory"]
    assert finding["verdict"] == "missing"
    assert "create it" in finding["fix"]
    outcome = command("doctor", "--cold-dir", tmp_path / "gone")
    assert outcome.out.splitlines()[-1].startswith("not ready")


def test_doctor_finds_no_optional_tool_on_an_empty_path(command, cold_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    for name in ("g++", "Verilator", "Icarus Verilog", "Vitis v++", "XRT"):
        assert findings[name]["verdict"] == "not found"
        assert findings[name]["fix"]
    tool = tmp_path / "verilator"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    findings = findings_of(command("doctor", "--cold-dir", cold_dir, "--json").out)
    assert findings["Verilator"] == {
        "name": "Verilator",
        "verdict": "ok",
        "found": str(tool),
        "fix": None,
    }


def test_doctor_works_without_torch(cold_dir):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "doctor", "--json", "--cold-dir", str(cold_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    findings = findings_of(done.stdout)
    assert findings["torch"]["verdict"] == "missing"
    assert findings["torch"]["fix"].startswith("pip install 'torch")
    assert findings["GPU"]["found"] == "unknown without torch"
    assert json.loads(done.stdout)["ready"] is False


def test_models_says_what_is_fetched(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = command("models")
    assert outcome.code == 0
    assert "missing: hillinfer fetch smollm2-135m" in outcome.out
    assert "Apache-2.0" in outcome.out


@pytest.mark.parametrize("name", ["generate", "doctor", "fetch", "models"])
def test_help_names_every_command(command, name):
    assert name in command("--help").out
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert "Usage: hillinfer" in outcome.out


def test_no_command_shows_the_help(command):
    outcome = command()
    assert outcome.code == 0
    assert outcome.out == command("--help").out
    assert len(outcome.out.splitlines()) > 5


def test_unknown_command_is_one_line(command):
    assert "'nope'" in command("nope").error_line()


def test_installed_script_is_this_command():
    script = Path(sys.executable).parent / "hillinfer"
    if not script.exists():
        pytest.skip("the hillinfer script is not installed: pip install -e .")
    done = subprocess.run([script, "models"], capture_output=True, text=True, check=True)
    assert "smollm2-135m" in done.stdout
