# SPDX-License-Identifier: Apache-2.0
"""The key of a cold pool is random, and lies in a page that goes nowhere."""

import ctypes
import os
from pathlib import Path

from hillinfer.secrecy.cold_pages import LockedKey
from hillinfer.secrecy.library import KEY_BYTES


def flags_at(address):
    """Return what the kernel knows of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return set(rest)
    raise AssertionError("no such mapping")


def test_it_is_locked_and_left_out_of_dumps_and_children():
    key, other = LockedKey(), LockedKey()
    flags = flags_at(key.address)
    # Not dumped, and wiped in children.
    assert {"dd", "wf"} <= flags
    assert ("lo" in flags) == key.is_locked
    own = ctypes.string_at(key.address, KEY_BYTES)
    assert len({own, ctypes.string_at(other.address, KEY_BYTES), bytes(KEY_BYTES)}) == 3
    child = os.fork()
    if child == 0:
        os._exit(int(ctypes.string_at(key.address, KEY_BYTES) != bytes(KEY_BYTES)))
    assert os.waitpid(child, 0)[1] == 0
    # The twin: other memory is neither.
    plain = ctypes.create_string_buffer(own, 1 << 20)
    assert not {"dd", "wf"} & flags_at(ctypes.addressof(plain))


def test_it_is_overwritten_when_it_is_erased():
    key = LockedKey()
    key.erase()
    key.erase()
    assert ctypes.string_at(key.address, KEY_BYTES) == bytes(KEY_BYTES)
