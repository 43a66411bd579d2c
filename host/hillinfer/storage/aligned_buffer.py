# SPDX-License-Identifier: Apache-2.0
"""Page-aligned memory, which direct I/O needs."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def aligned_buffer(byte_count: int) -> NDArray[np.uint8]:
    """Return a page-aligned uint8 array of `byte_count` rounded up to whole pages.

    Pages take memory only once they are touched.
    """
    return np.frombuffer(private_memory(byte_count), dtype=np.uint8)


def private_memory(byte_count: int) -> mmap.mmap:
    """Return anonymous memory of `byte_count` rounded up to whole pages.

    Private, because only then does MADV_DONTNEED give pages back: those of a shared mapping, which
    is what `mmap` makes by default, stay in memory.
    """
    return mmap.mmap(
        -1,
        round_up(max(byte_count, 1), PAGE_BYTES),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
