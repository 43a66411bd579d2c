# SPDX-License-Identifier: Apache-2.0
"""Tables that become longer where they lie."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

_Item = TypeVar("_Item", bound=np.generic)


class GrowingTable(Generic[_Item]):
    """Entries that are added behind the last one, which stay where they are as a rule.

    A table of the heap that grows by a copy leaves its old place behind. Of tables that took 70 MiB
    such places were 60 MiB more, which nothing counted (1M tokens of 4 layers). So address space is
    taken for up to twice as many entries; pages are memory once they are written to. Where it ends
    the entries move to other pages, and the old ones are given back with the last array over them.
    Where no address space is left to take, the heap has the entries, and no more than are wanted.

    Parameters
    ----------
    item
        Type of an entry.
    empty
        What an entry is at first.
    """

    def __init__(self, item: type[_Item], empty: int = 0) -> None:
        self._empty = empty
        self._item = np.dtype(item)
        self._room: NDArray[_Item] = np.zeros(0, item)
        self._memory: mmap.mmap | None = None

    def moving_bytes(self, before: int, entries: int) -> int:
        """Return what is there twice for a moment while a table of `before` entries grows."""
        return before * self._item.itemsize if entries > len(self._room) else 0

    def grown(self, before: NDArray[_Item], entries: int) -> NDArray[_Item]:
        """Return so many entries or more, those of an array that this gave last, and empty ones.

        Nothing that `before` shows changes, and as long as entries do not move it shows the same
        memory.
        """
        count, entries = len(before), max(len(before), entries)
        if entries > len(self._room):
            self._room = self._taken(entries)
        # Also where an interrupt came after the room was taken.
        if count and before.ctypes.data != self._room.ctypes.data:
            self._room[:count] = before
        self._room[count:entries] = self._empty
        return self._room[:entries]

    def cut(self, before: NDArray[_Item], entries: int) -> NDArray[_Item]:
        """Return the first entries of an array that this gave last; pages of the others go.

        They are zeros for whoever still looks at them.
        """
        start = -(-entries * self._item.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = -(-len(before) * self._item.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._memory is not None and start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
        return before[:entries]

    def _taken(self, entries: int) -> NDArray[_Item]:
        pages = -(-entries * self._item.itemsize // mmap.PAGESIZE)
        # A power of two, so that what moves becomes twice as large at least.
        size = (1 << (pages - 1).bit_length()) * mmap.PAGESIZE
        # Private, because only then does MADV_DONTNEED give pages back.
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            room, self._memory = np.zeros(entries, self._item), None
            return room
        # Where huge pages come unasked they would be memory that nobody counted.
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory = memory
        return np.frombuffer(memory, self._item)
