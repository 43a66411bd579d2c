# SPDX-License-Identifier: Apache-2.0
"""The NEON variant, cross-compiled and emulated where this machine has none of its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import build_native

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Where Debian's cross compiler has the C library.
SYSTEM_ROOT = "/usr/aarch64-linux-gnu"
CHECK = Path(__file__).with_name("neon_check.cpp")

pytestmark = pytest.mark.xdist_group("neon")


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """What runs the check with given arguments."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if not (emulator and shutil.which(COMPILER)):
        missing = (
            "NEON is not checked: make cross (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
        )
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    folder = tmp_path_factory.mktemp("neon")
    library = build_native.build(folder / "libhillinfer_native.so", COMPILER, "aarch64")
    program = folder / "neon_check"
    sources = ["-I", str(build_native.SOURCES), str(CHECK), str(library)]
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", *sources, "-o", str(program)],
        check=True,
    )

    def run(*arguments):
        environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
        return subprocess.run(
            [
                emulator,
                "-L",
                SYSTEM_ROOT,
                "-E",
                f"LD_LIBRARY_PATH={folder}",
                str(program),
                *arguments,
            ],
            env={**environment, "LD_LIBRARY_PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_neon_equals_portable(check):
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "115 cases, 0 differences"


def test_a_flipped_bit_is_found(check):
    done = check("flip")
    assert done.returncode == 1
    assert "scores differ: 3 KV heads" in done.stdout
    assert "attention differs by" in done.stdout
    assert "value shadows differ" in done.stdout
    assert "coded attention differs" in done.stdout
    assert "coded blocks differ" in done.stdout
    assert done.stdout.count("sums of rows differ") == 3
