# SPDX-License-Identifier: Apache-2.0
"""Free memory with the limits of control groups, read from trees made here."""

import mmap

import pytest

from hillinfer.system.machine import MemoryFacts, peak_rss_bytes, reset_peak_rss

GIB = 1 << 30
MEMINFO = f"MemTotal: {8 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB >> 10} kB\n"


@pytest.fixture
def machine(tmp_path):
    def write(cgroup, files):
        everything = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}
        for name, text in everything.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(text))
        return MemoryFacts.read(tmp_path)

    return write


def test_no_limit(machine):
    facts = machine("0::/\n", {})
    assert facts == MemoryFacts(8 * GIB, 6 * GIB, None)


@pytest.mark.parametrize("place", ["", "job/", "job/step/"])
def test_version_2_limit_of_any_group_above(machine, place):
    files = {
        f"sys/fs/cgroup/{place}memory.max": 3 * GIB,
        f"sys/fs/cgroup/{place}memory.current": 2 * GIB,
        # File pages not used lately are given back under pressure.
        f"sys/fs/cgroup/{place}memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 9\n",
        "sys/fs/cgroup/job/step/memory.events": "",
    }
    assert machine("0::/job/step\n", files) == MemoryFacts(8 * GIB, 2 * GIB, 3 * GIB)


def test_version_2_without_limit(machine):
    files = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": GIB}
    assert machine("0::/\n", files).limit_bytes is None


def test_version_1(machine):
    group = "sys/fs/cgroup/memory/jobs/7"
    files = {
        f"{group}/memory.limit_in_bytes": 4 * GIB,
        f"{group}/memory.usage_in_bytes": GIB,
        f"{group}/memory.stat": "total_inactive_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": (1 << 63) - 4096,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 7 * GIB,
    }
    facts = machine("9:cpu:/x\n4:memory:/jobs/7\n0::/\n", files)
    assert facts == MemoryFacts(8 * GIB, 3 * GIB, 4 * GIB)


def test_group_over_its_limit_has_nothing_left(machine):
    files = {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 2 * GIB}
    assert machine("0::/\n", files).available_bytes == 0


def test_limit_above_free_memory_does_not_add_any(machine):
    files = {"sys/fs/cgroup/memory.max": 100 * GIB, "sys/fs/cgroup/memory.current": 0}
    assert machine("0::/\n", files).available_bytes == 6 * GIB


@pytest.mark.parametrize(
    ("limit", "left"), [("unlimited", None), (5 * GIB, 4 * GIB), (GIB >> 1, 0)]
)
def test_a_limit_on_address_space_binds_too(machine, limit, left):
    files = {
        "proc/self/limits": f"Max cpu time   unlimited  unlimited  seconds\n"
        f"Max address space         {limit}   unlimited            bytes     \n",
        "proc/self/status": f"VmPeak:\t 9 kB\nVmSize:\t {GIB >> 10} kB\nVmRSS:\t 2 kB\n",
    }
    facts = machine("0::/\n", files)
    assert facts.address_bytes == left
    assert facts.available_bytes == (6 * GIB if left is None else left)


def test_this_machine():
    facts = MemoryFacts.read()
    assert 0 < facts.available_bytes <= facts.total_bytes


def test_peak_rises_with_use_and_falls_with_reset():
    size = 64 << 20
    reset_peak_rss()
    before = peak_rss_bytes()
    # A map of its own: memory from the heap may stay with the process when it is freed.
    held = mmap.mmap(-1, size)
    for _ in range(64):
        held.write(b"x" * (1 << 20))
    assert peak_rss_bytes() >= before + size // 2
    held.close()
    reset_peak_rss()
    assert peak_rss_bytes() < before + size // 2
