# SPDX-License-Identifier: Apache-2.0
"""Nothing of the directory a command is called from is run, nor read in a model's place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import save_gguf
from tiny_models import TinyModel

from hillinfer.models.loader import load_model

ROOT = Path(__file__).parents[3]
HILLINFER = Path(sys.executable).parent / "hillinfer"
# What is imported while an interpreter, pip, venv or a worker of multiprocessing starts.
PLANTED = (
    *("hillinfer/__init__.py", "json.py", "numpy.py", "pip/__init__.py", "pip/__main__.py"),
    *("pickle.py", "pyxrt.py", "runpy.py", "sitecustomize.py", "socket.py", "tempfile.py"),
    *("torch.py", "transformers.py", "typing.py", "venv/__init__.py", "venv/__main__.py"),
)
PLAIN = """
import os
with open(os.environ["MARKER"], "a") as marker:
    marker.write(__file__ + "\\n")
"""
# As `make` calls tools that need more than their own folder.
PEER = """
import sys
from pathlib import Path
from peers import peer_environment
requirements = Path(sys.argv[1])
(requirements / "made_up.txt").write_text("hillinfer-made-up==1.0\\n")
try:
    peer = peer_environment.PeerEnvironment("made_up", folder=requirements)
    peer.python(requirements / "build", 120)
except peer_environment.PeerSkippedError as error:
    print(error)
"""
CARD = """
import sys
from types import SimpleNamespace
from hillinfer_hw.generation_setting import GenerationSetting
from hillinfer_hw.hw_emu_run import compared_row, run_command
def run(command, environment):
    run_command([*command[:command.index("generate")], "models"], environment)
    sys.exit()
setting = GenerationSetting("smollm2-135m", "int4", "weight_sum", 1, 100)
compared_row(setting, "hls", SimpleNamespace(environment={}, xclbin="none"), run)
"""
# Commands as the script runs them, whose own folder is looked in and not the current one.
SCRIPT = """
import json, runpy, sys
script, ended = sys.argv[1], []
for words in json.loads(sys.argv[2]):
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        ended.append(error.code or 0)
print(json.dumps(ended))
"""
WORKERS = """
from hillinfer_bench.replay.processes import spawned_processes
if __name__ == "__main__":
    with spawned_processes(2) as workers:
        print(sum(workers.map(abs, [-1, 2])))
"""


@pytest.fixture
def planted(tmp_path):
    """A directory full of modules that leave their names in the file `marker`."""
    folder = tmp_path / "here"
    for name in PLANTED:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PLAIN)
    return folder


@pytest.fixture
def call(planted, tmp_path):
    """Run a command in the planted directory and return the outcome and what was run of it."""

    def called(*command, **variables):
        marker = tmp_path / "marker"
        # An index that nobody serves: fetching fails at once, without a network.
        environment = os.environ | {
            "MARKER": str(marker), "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_NO_INDEX": "0",
            **variables,
        }  # fmt: skip
        done = subprocess.run(
            list(map(str, command)), cwd=planted, env=environment, capture_output=True, text=True
        )
        return done, marker.read_text().splitlines() if marker.exists() else []

    return called


def test_what_is_planted_runs_where_it_is_looked_for(call):
    _, ran = call(sys.executable, "-m", "pip", "--version")
    assert any(name.endswith("pip/__main__.py") for name in ran)
    _, ran = call(sys.executable, "-c", "import json")
    assert any(name.endswith("json.py") for name in ran)


def test_the_command_runs_nothing_planted(call, tmp_path):
    """As users start it, and then all that imports what models are read with in one process."""
    done, ran = call(HILLINFER, "models")
    assert ran == []
    assert "smollm2-135m" in done.stdout
    program = tmp_path / "script" / "program.py"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    commands = (["fetch"], ["generate", "--model", "smollm2-135m", "--prompt", "a"], ["doctor"])
    done, ran = call(sys.executable, program, HILLINFER, json.dumps(commands))
    assert ran == []
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 2, 0], done.stderr
    assert done.stderr.count("pip download") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((ROOT / "tools" / "build_pyxrt.py",), "pyxrt: "),
        (("-c", PEER, "{folder}"), "cannot be installed"),
        (("-c", CARD), ""),
    ],
    ids=["build_pyxrt", "peers", "hw_emu"],
)
def test_tools_run_nothing_planted(command, said, call, tmp_path):
    given = [str(tmp_path) if one == "{folder}" else one for one in command]
    # -P, because the test's own program is no file; PYTHONPATH as the Makefile and XRT set it.
    done, ran = call(
        *(sys.executable, "-P", *given),
        PYTHONPATH=str(ROOT / "tools"),
        XILINX_XRT=str(tmp_path / "no-xrt"),
    )
    assert ran == [], done.stderr
    assert said in done.stdout
    assert done.returncode == 0, done.stderr


def test_workers_run_nothing_planted(call, tmp_path):
    """Of a script, whose own folder is looked in and not the current one; theirs would be."""
    program = tmp_path / "script" / "program.py"
    program.parent.mkdir()
    program.write_text(WORKERS)
    done, ran = call(sys.executable, program, PYTHONPATH=str(ROOT / "tools"))
    assert (done.stdout, ran) == ("3\n", []), done.stderr


def test_a_gguf_file_is_the_one_that_was_named(monkeypatch, tmp_path):
    named, other = tmp_path / "named", tmp_path / "other"
    sizes = {}
    for folder, layers in ((named, 2), (other, 3)):
        folder.mkdir()
        model = TinyModel(layers=layers, head_dim=16).build()
        sizes[folder] = model.num_parameters()
        save_gguf(folder / "tiny.gguf", model)
    # The same name in the current directory, of another model.
    monkeypatch.chdir(other)
    found = load_model(str(named / "tiny.gguf")).model.num_parameters()
    assert found == sizes[named] != sizes[other]
