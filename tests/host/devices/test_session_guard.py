# SPDX-License-Identifier: Apache-2.0
"""A guard ends what works in a folder when its host is gone, and only then or when told."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hillinfer.system.processes import SessionGuard, processes_in

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
HOST = """
import subprocess, sys, time
from pathlib import Path
from hillinfer.system.processes import SessionGuard
folder = Path(sys.argv[1])
guard = SessionGuard(folder)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=folder,
                 start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "session"
    made.mkdir()
    yield made
    for left in processes_in(made):
        os.kill(left, signal.SIGKILL)


def test_a_killed_host_leaves_neither_process_nor_folder(folder):
    host = subprocess.Popen([sys.executable, "-c", HOST, folder], stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "ready\n"
    assert len(processes_in(folder)) == 1
    host.kill()
    host.wait()
    # The guard holds no pipe of the host's either: whoever reads them comes to an end.
    assert host.stdout.read() == ""
    end = time.monotonic() + 60
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not folder.exists()
    assert processes_in(folder) == []


def test_while_the_host_lives_nothing_is_ended(folder):
    guard = SessionGuard(folder)
    with subprocess.Popen(SLEEP, cwd=folder) as working:
        time.sleep(0.2)
        assert working.poll() is None
        guard.close()
        assert working.wait(60) == -signal.SIGKILL
    assert not folder.exists()


def test_closing_waits_for_no_fork_of_the_host(folder):
    guard = SessionGuard(folder)
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
        os._exit(0)
    try:
        started = time.monotonic()
        guard.close()
        assert time.monotonic() - started < 300
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


@contextmanager
def few_descriptors(count):
    """Let this process open so many files more and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest numbers that are free: each of them is given next.
    free = [os.dup(1) for _ in range(count + 1)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_guard_that_cannot_start_leaves_no_folder(folder):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with few_descriptors(4), pytest.raises(OSError, match="Too many open files"):
        SessionGuard(folder)
    assert not folder.exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
