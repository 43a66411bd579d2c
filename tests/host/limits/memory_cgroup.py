# SPDX-License-Identifier: Apache-2.0
"""A control group with a hard memory limit, where this machine allows one."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(limit_bytes):
    """Yield the file to which a child writes its number, or skip with the reason."""
    group = _own_group() / f"hillinfer-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(
            f"no control group: {group} cannot be made ({error.strerror}); run as root, or "
            "with memory control delegated to you: systemd-run --user --scope -p Delegate=yes"
        )
    try:
        _limit(group, limit_bytes)
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def _own_group():
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _V1 / path.lstrip("/")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return _V2 / line.removeprefix("0::").lstrip("/")
    pytest.skip("no control groups: /proc/self/cgroup names none")
    return None


def _limit(group, limit_bytes):
    v1 = group / "memory.limit_in_bytes"
    v2 = group / "memory.max"
    limit = v1 if v1.exists() else v2
    if not limit.exists():
        pytest.skip(
            f"no memory control in {group.parent}: echo +memory > "
            f"{group.parent}/cgroup.subtree_control"
        )
    limit.write_text(str(limit_bytes))
    for name, value in (("memory.swappiness", "0"), ("memory.swap.max", "0")):
        if (group / name).exists():
            (group / name).write_text(value)
