# SPDX-License-Identifier: Apache-2.0
"""Memory that was dropped is taken again, and never while somebody has a part of it."""

import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
from waiting import until

from hillinfer.system.kept_memory import BLOCK_BYTES, KeptMemory

ROLLUP = Path("/proc/self/smaps_rollup")


def place(block):
    return block.ctypes.data


def test_a_block_that_was_dropped_is_taken_again():
    memory = KeptMemory()
    block = memory.taken(3 << 20)
    first = place(block)
    assert first % mmap.PAGESIZE == 0
    block[:] = 5
    part = block[100:200].view(np.int32)
    del block
    gc.collect()
    # Somebody has a part of it.
    assert memory.kept_bytes == 0
    other = memory.taken(3 << 20)
    assert place(other) != first
    other[:] = 6
    assert (part.view(np.uint8) == 5).all()
    del part
    gc.collect()
    assert memory.kept_bytes == BLOCK_BYTES
    again = memory.taken(1)
    assert place(again) == first
    again[:] = 7
    assert (again == 7).all()
    assert memory.kept_bytes == 0


def test_blocks_of_another_size_are_others():
    memory = KeptMemory()
    small, large = memory.taken(1), memory.taken(BLOCK_BYTES + 1)
    assert (len(small), len(large)) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    first = place(small)
    del small
    gc.collect()
    assert place(memory.taken(BLOCK_BYTES + 1)) != first


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (2, 2), (3, 3), (8, 3)])
def test_no_more_is_kept_than_is_allowed(most, kept):
    memory = KeptMemory(most * BLOCK_BYTES)
    blocks = [memory.taken(BLOCK_BYTES) for _ in range(3)]
    blocks.clear()
    gc.collect()
    assert memory.kept_bytes == kept * BLOCK_BYTES


@pytest.mark.parametrize(
    ("release", "kept"),
    [
        ("5.18.0", 1),
        ("6.1.0-18-amd64", 1),
        ("10.0", 1),
        ("5.17.15-051715-generic", 0),
        ("5.4.0-1103-aws", 0),
        ("4.18.0-553.el8", 0),
        ("", 0),
        ("unknown", 0),
    ],
)
def test_nothing_is_kept_where_direct_reads_into_it_may_be_lost(release, kept):
    memory = KeptMemory(release=release)
    block = memory.taken(4096)
    block[:4096] = 5
    del block
    gc.collect()
    assert memory.kept_bytes == kept * BLOCK_BYTES
    # It is taken all the same.
    memory.taken(4096)[:4096] = 6


def test_threads_never_have_the_same_block():
    memory, wrong = KeptMemory(4 * BLOCK_BYTES), []

    def work(number):
        for _ in range(50):
            block = memory.taken(4096)
            block[:4096] = number
            wrong.extend(block[:4096][block[:4096] != number].tolist())
            del block

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert memory.kept_bytes <= 4 * BLOCK_BYTES


def offered_bytes():
    """Return the bytes of this process that the system may have whenever it wants them."""
    lines = ROLLUP.read_text().splitlines()
    return sum(int(one.split()[1]) << 10 for one in lines if one.startswith("LazyFree:"))


@pytest.mark.skipif(not ROLLUP.exists(), reason="this system does not tell")
def test_the_system_may_have_what_nobody_takes_for_a_while():
    memory = KeptMemory(rest_seconds=0.5)
    block = memory.taken(BLOCK_BYTES)
    block[:] = 5
    first, before = place(block), offered_bytes()
    del block
    # At once it is still as it was, and whoever takes it again has nothing to pay for.
    block = memory.taken(BLOCK_BYTES)
    assert place(block) == first
    assert (block == 5).all()
    del block
    until(lambda: offered_bytes() >= before + BLOCK_BYTES // 2)
    assert memory.kept_bytes == BLOCK_BYTES
    block = memory.taken(BLOCK_BYTES)
    assert place(block) == first
    block[:] = 6
    assert (block == 6).all()
    # What is given back later rests anew.
    del block
    until(lambda: offered_bytes() >= before + BLOCK_BYTES // 2)
