# SPDX-License-Identifier: Apache-2.0
"""The real XRT, called through pyxrt, on emulated cards of both engines."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from emulated_cards import ONE_PROCESS

from hillinfer.devices.xrt.process import environment_of
from hillinfer_hw.emulation import Engine

PROGRAMS = [
    "image", "both_kernels", "launches_in_flight", "sub_buffers", "peer_to_peer",
    "close_and_reopen",
]  # fmt: skip
HERE = Path(__file__).parent

pytestmark = ONE_PROCESS


@pytest.fixture
def start(cards):
    """Starts a program; XRT's driver makes its sockets in /tmp/$USER, which goes with the test."""
    sockets = Path(tempfile.mkdtemp(prefix="hillinfer-test-", dir="/tmp"))

    def of(engine, program, folder, flipped_bits=0):
        surrounding = cards(engine)
        lead = dict(environment_of(surrounding.xclbin))
        folder.mkdir(exist_ok=True)
        lead["FLIPPED_BITS"] = str(flipped_bits)
        lead["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *filter(None, sys.path)])
        lead["USER"] = sockets.name
        # Two processes must not share what the driver makes.
        lead["SDACCEL_EM_RUN_DIR"] = str(folder)
        return subprocess.Popen(
            [sys.executable, HERE / "xrt_programs.py", program, surrounding.xclbin, folder],
            cwd=folder, env=os.environ | lead, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    yield of
    shutil.rmtree(sockets)


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(start, tmp_path, engine, program):
    process = start(engine, program, tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


@pytest.mark.parametrize("program", [one for one in PROGRAMS if one != "image"])
def test_a_flipped_bit_ends_a_program_with_a_difference(start, tmp_path, program):
    process = start(Engine.HLS, program, tmp_path, flipped_bits=1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Mismatched elements: 1 /" in said


def test_two_processes_at_once(start, tmp_path):
    started = [
        start(Engine.RTL, program, tmp_path / program)
        for program in ("both_kernels", "peer_to_peer")
    ]
    for process in started:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
