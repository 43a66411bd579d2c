# SPDX-License-Identifier: Apache-2.0
"""What memory the system says that addresses take."""

import mmap
from pathlib import Path

import numpy as np

PAGES = Path("/proc/self/pagemap")
_PRESENT = np.uint64(1 << 63)
_SMAPS = Path("/proc/self/smaps")


def taken(start, stop):
    """Return the bytes between two addresses that are memory, or were read: both are there."""
    with PAGES.open("rb", buffering=0) as file:
        file.seek(start // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read((stop - start) // mmap.PAGESIZE * 8), np.uint64)
    assert len(entries) == (stop - start) // mmap.PAGESIZE
    return int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE


def huge(start, stop):
    """Return the bytes of huge pages in mappings that lie between two addresses."""
    found, inside = 0, False
    for line in _SMAPS.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            first, last = (int(address, 16) for address in head.split("-"))
            inside = first < stop and start < last
        elif inside and head == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    return found


def asked_huge(start, stop):
    """Return the bytes between two addresses that the system was asked to make huge pages of."""
    found, own = 0, 0
    for line in _SMAPS.read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            first, last = (int(address, 16) for address in head.split("-"))
            own = max(0, min(stop, last) - max(start, first))
        elif head == "VmFlags:" and "hg" in rest:
            found += own
    return found


def run_huge(run):
    """Return the bytes of a `HugeRun`'s huge pages."""
    return huge(run.addresses.start, run.addresses.stop)


def run_taken(run):
    """Return the bytes that a `HugeRun` takes."""
    return taken(run.addresses.start, run.addresses.stop)
