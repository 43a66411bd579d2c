# SPDX-License-Identifier: Apache-2.0
"""Memory kept for reuse: page-aligned blocks, a bounded LRU cache of values, and the freed heap."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import threading
import time
import weakref
from _thread import start_new_thread
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

# Blocks are of whole ones of this, so that what follows fits what was there before. What is never
# touched takes no memory.
BLOCK_BYTES = 64 << 20
# What one line of a page table maps where the system makes it so: of x86-64, and of others here.
HUGE_BYTES = 2 << 20
# Zeroing a huge page takes a tenth of this. Where a host has taken free memory of its guests back,
# as some do, one takes ten times as long to come, and its small pages together less than this.
_CHEAP_SECONDS = 1e-3
# Before, reclaim of memory that is given up this way may race with direct reads into it that have
# begun already: zeros may be there in the place of what was read (MADV_FREE, Linux 5.18).
_FREED_SINCE = (5, 18)
# What is freed of a heap before it is looked through.
_FREED_BYTES = 8 << 20
# A block that nobody took again for so long may be the system's. To say so and to write there again
# takes 0.4 µs a page, twice as much as to fill it: 34 ms of 372 MB, measured.
_REST_SECONDS = 2.0


@dataclass(eq=False)
class _Kept:
    """A block that nobody uses.

    Parameters
    ----------
    memory
        The block.
    since
        When it was given back, in seconds of `time.monotonic`.
    is_offered
        Whether the system may have it.
    """

    memory: mmap.mmap
    since: float = field(default_factory=time.monotonic)
    is_offered: bool = False


class KeptMemory:
    """Blocks of page-aligned memory, which is uninitialized and taken again when it is dropped.

    Taking pages of the system and zeroing them costs as much as filling them. What nobody takes for
    some seconds is the system's whenever it is short of memory, and counts as this process' until
    then. New blocks come in huge pages where those come quickly. Any thread may use it.

    Parameters
    ----------
    most_bytes
        How much is kept. On a Linux before 5.18, or of no known version, nothing is: there the
        system must not have memory back that drives may read into.
    release
        The kernel's, as `platform.release` says it; this machine's where None.
    rest_seconds
        How long a block is kept before the system may have it.
    """

    def __init__(
        self,
        most_bytes: int = 1 << 30,
        release: str | None = None,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        is_safe = _frees_safely(platform.release() if release is None else release)
        self._most = most_bytes if is_safe and hasattr(mmap, "MADV_FREE") else 0
        self._rest_seconds = rest_seconds
        self._is_resting = False
        # What is collected while it is held gives its block back in the same thread.
        self._lock = threading.RLock()
        self._kept: defaultdict[int, list[_Kept]] = defaultdict(list)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept and nobody uses."""
        with self._lock:
            return self._kept_bytes()

    def taken(self, byte_count: int) -> NDArray[np.uint8]:
        """Return a block, uint8, of so many bytes at least; others use it when nobody has it."""
        size = -(-max(byte_count, 1) // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            memory = self._kept[size].pop().memory if self._kept[size] else None
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
        with self._lock:
            if self._kept_bytes() + size > self._most:
                return
            kept = _Kept(memory)
            self._kept[size].append(kept)
            if self._is_resting:
                return
            try:
                # No `threading.Thread`: what is collected in the middle of making one comes here.
                start_new_thread(self._rest, ())
                self._is_resting = True
            except RuntimeError:
                self._offer(kept)

    def _rest(self) -> None:
        """Let the system have what nobody took for a while, until it may have all of it."""
        while True:
            time.sleep(self._rest_seconds)
            for kept in self._unoffered():
                with self._lock:
                    is_due = time.monotonic() - kept.since >= self._rest_seconds
                    if is_due and kept in self._kept[len(kept.memory)]:
                        self._offer(kept)
            with self._lock:
                if not self._unoffered():
                    self._is_resting = False
                    return

    def _unoffered(self) -> list[_Kept]:
        with self._lock:
            return [one for kept in self._kept.values() for one in kept if not one.is_offered]

    def _offer(self, kept: _Kept) -> None:
        """Let the system have a block when it is short of memory; what it may not is not kept."""
        try:
            kept.memory.madvise(mmap.MADV_FREE)
            kept.is_offered = True
        except OSError:
            self._kept[len(kept.memory)].remove(kept)


def _frees_safely(release: str) -> bool:
    """Whether direct reads into memory that was given up come through on a kernel."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= _FREED_SINCE


def _advise(memory: mmap.mmap, wanted: int) -> None:
    """Ask for huge pages, and for small ones again where the first huge one is slow to come."""
    if wanted < HUGE_BYTES:
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

    The GNU allocator keeps freed memory below the last piece that is in use. Tables that grew by
    constant steps, and rows that came and went between them, left 200 MiB there that M0 does not
    count (1M tokens of 4 layers). It takes 1 to 3 ms of a heap of 300 MiB, measured.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class FreedHeap:
    """Gives memory back each time that enough of it was freed.

    Until then the heap holds it beside what others take meanwhile, and M0 does not count it.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def note(self, byte_count: int) -> None:
        """Note that so many bytes were freed; below 0 where they were taken."""
        self._bytes = max(0, self._bytes + byte_count)
        if self._bytes >= _FREED_BYTES:
            self._bytes = 0
            give_free_memory_back()


# --- Values by their keys ---

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class KeptValues(Generic[_Key, _Value]):
    """Values whose bytes are bounded; those that were used longest ago go first.

    Any thread may use it.

    Parameters
    ----------
    most_bytes
        What they may take.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, keys: Sequence[_Key]) -> list[_Value | None]:
        """Return the values of some keys, None where one is not kept."""
        found: list[_Value | None] = []
        with self._lock:
            for key in keys:
                own = self._values.get(key)
                if own is not None:
                    self._values.move_to_end(key)
                found.append(None if own is None else own[0])
        return found

    def keep(self, values: Iterable[tuple[_Key, _Value, int]]) -> None:
        """Keep values by their keys, which take so many bytes each; one that is kept stays."""
        with self._lock:
            for key, value, byte_count in values:
                if key not in self._values:
                    self._bytes += byte_count
                    self._values[key] = value, byte_count
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._values.popitem(last=False)
                self._bytes -= gone

    def clear(self) -> None:
        """Keep none any more."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
