# SPDX-License-Identifier: Apache-2.0
"""The wheel has the native library, fits any Linux that auditwheel names, and installs cleanly."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build_native import find_compiler

ROOT = Path(__file__).parents[1]
LIBRARY = "hillinfer/native/libhillinfer_native.so"
# Newer ones than Debian 12 and Ubuntu 22.04 have would shut many machines out.
NEWEST_GLIBC = 36

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="manylinux is about glibc, which is not here"
)


def said(*command, **options):
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def auditwheel(*arguments):
    return said(sys.executable, "-m", "auditwheel", *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What `pip wheel .` makes of this tree, by the build system that is pinned."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    # The tests' own library, which takes a minute to compile.
    variables = {**os.environ, "HILLINFER_NATIVE": "current"}
    said(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, env=variables)
    (made,) = folder.glob("*.whl")
    return made


def test_it_is_of_this_processor_and_any_python(wheel):
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_auditwheel_finds_it_manylinux(wheel):
    found = re.search(r"manylinux_2_(\d+)_", auditwheel("show", wheel))
    assert found is not None
    assert int(found[1]) <= NEWEST_GLIBC


def test_a_library_of_one_machine_alone_is_not_manylinux(wheel, tmp_path):
    """The twin: the check looks at what is in the wheel."""
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int other() { return 1; }\n')
    own = tmp_path / "own.cpp"
    own.write_text('extern "C" int other();\nextern "C" int own() { return other(); }\n')
    compiler = find_compiler()
    said(compiler, "-shared", "-fPIC", source, "-o", tmp_path / "libother.so")
    made = tmp_path / "own.so"
    said(compiler, "-shared", "-fPIC", own, f"-L{tmp_path}", "-lother", "-o", made)
    changed = tmp_path / "changed" / wheel.name
    changed.parent.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for one in old.namelist():
            new.writestr(one, made.read_bytes() if one == LIBRARY else old.read(one))
    assert "manylinux_2" not in auditwheel("show", changed).partition("\n\n")[0]


def test_it_installs_into_a_clean_environment(wheel, tmp_path):
    """With what it says that it needs, and nothing else."""
    if not (os.environ.get("CI") or os.environ.get("HILLINFER_WHEEL")):
        # Of torch alone that may be gigabytes.
        pytest.skip("fetches all that a wheel needs: run it with HILLINFER_WHEEL=1")
    place = tmp_path / "clean"
    said(sys.executable, "-m", "venv", "--without-pip", place)
    python, variables = place / "bin/python", {**os.environ, "HOME": str(tmp_path)}
    variables.pop("PYTHONPATH", None)
    # The user's own settings and what pip has fetched before are for pip alone.
    fetching = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = (sys.executable, "-I", "-m", "pip", "--python", python, "--disable-pip-version-check")
    options = ("--quiet", "--no-compile", "--retries", "1", "-c", ROOT / "constraints.txt")
    ended = subprocess.run(
        list(map(str, (*pip, "install", *options, wheel))),
        capture_output=True,
        text=True,
        check=False,
        env=fetching,
    )
    assert ended.returncode == 0, ended.stderr
    code = "from hillinfer.native.library import LIBRARY, native_library\n"
    code += "native_library(); print(LIBRARY)"
    loaded = said(python, "-c", code, env=variables, cwd=tmp_path).strip()
    assert Path(loaded).is_relative_to(place)
    told = said(place / "bin/hillinfer", env=variables, cwd=tmp_path)
    assert all(word in told for word in ("chat", "serve", "generate"))
    shutil.rmtree(place)
