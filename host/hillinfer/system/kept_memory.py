# SPDX-License-Identifier: Apache-2.0
"""Memory that is kept for the next one who wants some: by us on purpose, by the heap unasked."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import threading
import time
import weakref
from collections import defaultdict
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

# Blocks are of whole ones of this, so that what follows fits what was there before. What is never
# touched takes no memory.
BLOCK_BYTES = 64 << 20
_HUGE_BYTES = 2 << 20
# Zeroing a huge page takes a tenth of this. Where a host has taken free memory of its guests back,
# as some do, one takes ten times as long to come, and its small pages together less than this.
_CHEAP_SECONDS = 1e-3
# Before, reclaim of memory that is given up this way may race with direct reads into it that have
# begun already: zeros may be there in the place of what was read (MADV_FREE, Linux 5.18).
_FREED_SINCE = (5, 18)


class KeptMemory:
    """Blocks of page-aligned memory, which is uninitialized and taken again when it is dropped.

    Taking pages of the system and zeroing them costs as much as filling them. What is kept is the
    system's whenever it is short of memory, and counts as this process' until then. New blocks
    come in huge pages where those come quickly. Any thread may use it.

    Parameters
    ----------
    most_bytes
        How much is kept. On a Linux before 5.18, or of no known version, nothing is: there the
        system must not have memory back that drives may read into.
    release
        The kernel's, as `platform.release` says it; this machine's where None.
    """

    def __init__(self, most_bytes: int = 1 << 30, release: str | None = None) -> None:
        is_safe = _frees_safely(platform.release() if release is None else release)
        self._most = most_bytes if is_safe else 0
        # What is collected while it is held gives its block back in the same thread.
        self._lock = threading.RLock()
        self._kept: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept and nobody uses."""
        with self._lock:
            return self._kept_bytes()

    def taken(self, byte_count: int) -> NDArray[np.uint8]:
        """Return a block, uint8, of so many bytes at least; others use it when nobody has it."""
        size = -(-max(byte_count, 1) // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            memory = self._kept[size].pop() if self._kept[size] else None
        if memory is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _advise(memory, min(byte_count, size))
        block = np.frombuffer(memory, np.uint8)
        weakref.finalize(block, self._give, memory).atexit = False
        return block

    # --- inside ----------------------------------------------------------------------------

    def _kept_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in [*self._kept.items()])

    def _give(self, memory: mmap.mmap) -> None:
        size = len(memory)
        # What the system may not have when it is short of memory is not kept.
        with self._lock, suppress(OSError, AttributeError):
            if self._kept_bytes() + size <= self._most:
                memory.madvise(mmap.MADV_FREE)
                self._kept[size].append(memory)


def _frees_safely(release: str) -> bool:
    """Whether direct reads into memory that was given up come through on a kernel."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= _FREED_SINCE


def _advise(memory: mmap.mmap, wanted: int) -> None:
    """Ask for huge pages, and for small ones again where the first huge one is slow to come."""
    if wanted < _HUGE_BYTES:
        return
    # A kernel that has none refuses.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        began = time.thread_time()
        memory[0] = 0
        if time.thread_time() - began > _CHEAP_SECONDS:
            memory.madvise(mmap.MADV_NOHUGEPAGE)


def give_free_memory_back() -> None:
    """Give the system what the heap holds and nobody uses; does nothing where it cannot.

    The GNU allocator keeps freed memory below the last piece that is in use. Tables that grow by
    constant steps, and rows that come and go between them, left 200 MiB there that M0 does not
    count (1M tokens of 4 layers). It takes 1 to 3 ms of a heap of 300 MiB, measured.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
