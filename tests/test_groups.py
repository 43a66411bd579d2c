# SPDX-License-Identifier: Apache-2.0
"""What shares a fixture runs in one worker, or the suite builds everything twice."""

import subprocess
import sys

CASES = """
import os

import pytest

CASES = [pytest.param(number, marks=pytest.mark.xdist_group({group})) for number in range(4)]


@pytest.mark.parametrize("number", CASES)
def test_case(number):
    print("worker", os.environ["PYTEST_XDIST_WORKER"])
"""


def workers(folder, group):
    """Return which workers ran four tests, given the group of a `number`."""
    (folder / "test_cases.py").write_text(CASES.format(group=group))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rP"),
            *("--disable-plugin-autoload", "-p", "xdist"),
            *("-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("worker ")]
    assert len(said) == 4, done.stdout
    return {*said}


def test_a_group_of_tests_has_one_worker(tmp_path):
    """The tested versions of pytest and pytest-xdist know groups; some pairs do not."""
    assert len(workers(tmp_path, "'one'")) == 1


def test_groups_of_one_have_two(tmp_path):
    assert len(workers(tmp_path, "str(number)")) == 2
