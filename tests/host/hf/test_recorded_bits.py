# SPDX-License-Identifier: Apache-2.0
"""Output bits are those of before all caches of a model shared one engine.

Recorded at the last commit before, on three prompts, two budgets and a session. Bits of products
depend on the processor, so each kind of processor has its record; `recorded_run.py` at that commit,
with the variables below, makes another.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hillinfer.native.library import native_library

RUN = Path(__file__).with_name("recorded_run.py")
# What every processor of its kind has, as far as libraries can be told so.
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(RUN.parents[1]), os.environ.get("PYTHONPATH", "")]),
}
_AVX512 = {
    "150": "9895fbed0e067703",
    "1100": "f8a9107c08f1db63",
    "2300": "569bab7478fbfa32",
    "session": "3aba65c433375e0d",
}
# By the processor's vendor and what the native library computes with.
RECORDED = {
    ("GenuineIntel", "avx512vnni"): _AVX512,
    # A Zen 4.
    ("AuthenticAMD", "avx512vnni"): _AVX512,
    # A Zen 3.
    ("AuthenticAMD", "avx2"): {
        "150": "89977a5afd821513",
        "1100": "48021d4875ecddfd",
        "2300": "e1d59c8122266ae9",
        "session": "22bc95080693f4c9",
    },
}


def processor():
    """Return the key of this machine in the table."""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    variant = native_library().variants[0].value
    return (found.group(1) if found else "unknown", variant)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    kind = processor()
    if kind not in RECORDED:
        pytest.skip(f"no bits were recorded on {' with '.join(kind)}: run {RUN.name} at 0ef3443")
    done = subprocess.run(
        [sys.executable, RUN, tmp_path_factory.mktemp("recorded")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | VARIABLES,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("budget", ["25%", "400%"])
@pytest.mark.parametrize("prompt", ["150", "1100", "2300", "session"])
def test_bits_are_those_of_before(told, prompt, budget):
    assert told[f"{prompt} {budget}"] == RECORDED[processor()][prompt]


def test_every_run_has_bits_of_its_own(told):
    assert len(set(told.values())) == 4
