# SPDX-License-Identifier: Apache-2.0
"""The real XRT, called through pyxrt, on emulated cards of both engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cards import ONE_PROCESS

from hillinfer_hw.emulation import Engine

PROGRAMS = [
    "image", "both_kernels", "launches_in_flight", "sub_buffers", "peer_to_peer",
    "close_and_reopen",
]  # fmt: skip
HERE = Path(__file__).parent

pytestmark = ONE_PROCESS


def start(surrounding, program, folder):
    lead = json.loads(surrounding.xclbin.with_name("environment.json").read_text())
    folder.mkdir(exist_ok=True)
    sockets = Path("/tmp") / f"hillinfer-test-{os.getpid()}"
    sockets.mkdir(mode=0o700, exist_ok=True)
    lead["PYTHONPATH"] = os.pathsep.join([lead["PYTHONPATH"], *filter(None, sys.path)])
    lead["USER"] = sockets.name
    # Two processes must not share what the driver makes.
    lead["SDACCEL_EM_RUN_DIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, HERE / "xrt_programs.py", program, surrounding.xclbin, folder],
        cwd=folder, env=os.environ | lead, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(cards, tmp_path, engine, program):
    process = start(cards(engine), program, tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


def test_two_processes_at_once(cards, tmp_path):
    started = [
        start(cards(Engine.RTL), program, tmp_path / program)
        for program in ("both_kernels", "peer_to_peer")
    ]
    for process in started:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
