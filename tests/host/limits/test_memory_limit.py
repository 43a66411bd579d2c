# SPDX-License-Identifier: Apache-2.0
"""Under a hard memory limit the ordinary cache is killed and HillInfer answers as without it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from memory_cgroup import memory_cgroup

SCRIPT = Path(__file__).parent / "limited_run.py"
# One process makes the run that the limit comes from.
pytestmark = pytest.mark.xdist_group("memory-limit")
# What a process needs beyond its own peak: for page tables, pages of files, and own copies of what
# the process that forked it had, some 45 MiB; and peaks of the same run differ by 40.
SLACK = 104 << 20


@pytest.fixture(scope="module")
def run(warm_python, cold_dir):
    """Return a function that runs one kind of cache, in a control group where one is given."""

    def ran(kind, *processes):
        # Whatever else this machine does, threads that wait must not take its time.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*warm_python, str(SCRIPT), kind, str(cold_dir), *map(str, processes)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=environment, check=False
        )

    return ran


@pytest.fixture(scope="module")
def free_run(run):
    done = run("hillinfer")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def limited(free_run):
    with memory_cgroup(free_run["peak_bytes"] + SLACK) as processes:
        yield processes


def test_hillinfer_finishes_with_the_same_tokens(run, limited, free_run):
    done = run("hillinfer", limited)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == free_run["tokens"]
    assert len(set(free_run["tokens"])) > 2, "tokens that say something"


def test_the_ordinary_cache_is_killed(run, limited):
    done = run("ordinary", limited)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == ""


def test_without_the_limit_the_ordinary_cache_finishes(run, free_run):
    """The twin: it is the limit that kills, and the cache that takes what it does not have."""
    done = run("ordinary")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_bytes"] > free_run["peak_bytes"] + SLACK
