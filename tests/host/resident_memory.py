# SPDX-License-Identifier: Apache-2.0
"""What memory the system says that addresses take."""

import mmap
from pathlib import Path

import numpy as np

PAGES = Path("/proc/self/pagemap")
_PRESENT = np.uint64(1 << 63)
_ROLLUP = Path("/proc/self/smaps_rollup")


def taken(start, stop):
    """Return the bytes between two addresses that are memory, or were read: both are there."""
    with PAGES.open("rb", buffering=0) as file:
        file.seek(start // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read((stop - start) // mmap.PAGESIZE * 8), np.uint64)
    assert len(entries) == (stop - start) // mmap.PAGESIZE
    return int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE


def huge():
    """Return the bytes of all huge pages of this process."""
    found = [line for line in _ROLLUP.read_text().splitlines() if line.startswith("AnonHugePages")]
    return int(found[0].split()[1]) << 10


def run_taken(run):
    """Return the bytes that a `HugeRun` takes."""
    start = np.frombuffer(run._mapping, np.uint8).ctypes.data
    return taken(start, start + len(run._mapping))
