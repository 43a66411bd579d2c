# SPDX-License-Identifier: Apache-2.0
"""Tests find the fixtures of their folders, whatever a command names in whichever order."""

import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).with_name("conftest.py")
FIXTURE = """
import pytest


@pytest.fixture
def of_{folder}():
    return 1
"""
WITH_THE_HOOK = f"""
import importlib.util

spec = importlib.util.spec_from_file_location("shared", {str(SHARED)!r})
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
pytest_collect_directory = shared.pytest_collect_directory
"""
# Behind the first one the folders above its file are there; the second one collects one anew.
NAMED = {
    "a file above": ("host/engine/test_one.py", "test_top.py", "host/drive"),
    "a file beside": ("host/engine/test_one.py", "host/test_host.py", "host/engine/test_three.py"),
}


def passed(folder, named, shared):
    """Say whether what is named finds its fixtures, with this text of the conftest.py of all."""
    files = {
        "conftest.py": shared,
        "test_top.py": "def test_it():\n    pass\n",
        "host/conftest.py": FIXTURE.format(folder="host"),
        "host/test_host.py": "def test_it(of_host):\n    pass\n",
        "host/drive/test_two.py": "def test_it(of_host):\n    pass\n",
        "host/engine/conftest.py": FIXTURE.format(folder="engine"),
        "host/engine/test_one.py": "def test_it(of_host, of_engine):\n    pass\n",
        "host/engine/test_three.py": "def test_it(of_host, of_engine):\n    pass\n",
    }
    for name, text in files.items():
        place = folder / "tests" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--disable-plugin-autoload"),
            *("-p", "no:cacheprovider", "--rootdir", str(folder)),
            *(str(folder / "tests" / one) for one in named),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_what_is_named_finds_its_fixtures(named, tmp_path):
    assert passed(tmp_path, named, WITH_THE_HOOK)


@pytest.mark.skipif(pytest.version_tuple < (9, 1), reason="fixtures were of paths, not of nodes")
@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_without_the_hook_it_does_not(named, tmp_path):
    """Where this fails the hook can go: pytest keeps the nodes by itself."""
    assert not passed(tmp_path, named, "")
