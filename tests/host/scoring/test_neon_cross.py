# SPDX-License-Identifier: Apache-2.0
"""The NEON variant, cross-compiled and emulated where this machine has none of its own."""

import os
import re
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

# Inlines what intrinsics are, without which the emulated code would take longer than its compiler.
LEVEL = "-Og"
STANDARD = re.compile(r"^#include <\w+>$", re.MULTILINE)

pytestmark = pytest.mark.xdist_group("neon")


def _build(folder):
    """Compile the library's sources for the processor, and the check, and link all of it.

    What is not compared is linked, too, so that nothing is missing on this processor. The flags are
    the library's, but of optimisation: what is computed must not depend on that, and most of the
    compiler's time does.
    """
    flags = [*build_native.FLAGS, LEVEL, f"-I{folder}", f"-I{build_native.SOURCES}"]
    # Half of what is left would be the standard library's headers, once for each source.
    sources = build_native.SOURCES.iterdir()
    texts = [one.read_text() for one in sources if one.suffix in (".h", ".cpp")]
    headers = sorted({line for text in texts for line in STANDARD.findall(text)})
    (folder / "standard.h").write_text("\n".join(headers))
    _compile([*flags, "-x", "c++-header", "standard.h", "-o", "standard.h.gch"], folder)
    objects = []
    for name, own in (build_native.COMMON | build_native.OWN_FLAGS["aarch64"]).items():
        source = str(build_native.SOURCES / f"{name}.cpp")
        objects.append(f"{name}.o")
        included = ["-include", "standard.h", "-c", source]
        _compile([*flags, *own, *included, "-o", objects[-1]], folder)
    own = ["-std=c++17", LEVEL, "-Wall", "-Wextra", f"-I{build_native.SOURCES}", str(CHECK)]
    _compile([*own, *objects, "-pthread", "-ldl", "-o", "neon_check"], folder)


def _compile(arguments, folder):
    done = subprocess.run(
        [COMPILER, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


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
    _build(folder)
    program = folder / "neon_check"

    def run(*arguments):
        return subprocess.run(
            [
                emulator,
                "-L",
                SYSTEM_ROOT,
                str(program),
                *arguments,
            ],
            env={**os.environ, "LD_LIBRARY_PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_neon_equals_portable(check):
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "67 cases, 0 differences"


def test_a_flipped_bit_is_found(check):
    done = check("flip")
    assert done.returncode == 1
    assert "scores differ: 3 KV heads" in done.stdout
    assert "attention differs by" in done.stdout
    assert "value shadows differ" in done.stdout
    assert "coded attention differs" in done.stdout
    assert "coded blocks differ" in done.stdout
    assert done.stdout.count("sums of rows differ") == 3
