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
    pages = mmap.mmap(-1, round_up(max(byte_count, 1), PAGE_BYTES))
    return np.frombuffer(pages, dtype=np.uint8)
