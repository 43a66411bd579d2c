# SPDX-License-Identifier: Apache-2.0
"""A random key that lies in memory alone: in a page that is neither swapped nor dumped."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from hillinfer.drive.files import PAGE_BYTES, private_memory
from hillinfer.secrecy.library import KEY_BYTES, SecrecyError

# Linux: a child of a fork sees zeros. Not in Python's `mmap` before 3.13.
_MADV_WIPEONFORK = 18


class LockedKey:
    """32 random bytes that nothing but this process has, from the kernel, in a page of their own.

    The kernel is asked to keep that page out of swap, of core dumps and of children. Where it
    refuses, for one because of `ulimit -l`, the key lies there all the same: `is_locked` says so.

    Raises
    ------
    SecrecyError
        Where the kernel gives no random bytes.
    """

    def __init__(self) -> None:
        self._page = private_memory(PAGE_BYTES)
        self._bytes = (ctypes.c_char * PAGE_BYTES).from_buffer(self._page)
        self.address: int = ctypes.addressof(self._bytes)
        system = ctypes.CDLL(None, use_errno=True)
        self.is_locked = not system.mlock(ctypes.c_void_p(self.address), PAGE_BYTES)
        # Before there is anything to keep.
        for advice in (mmap.MADV_DONTDUMP, _MADV_WIPEONFORK):
            with suppress(OSError):
                self._page.madvise(advice)
        # Straight to its place: of a Python object copies stay in memory.
        made = system.getrandom(ctypes.c_void_p(self.address), KEY_BYTES, 0)
        if made != KEY_BYTES:
            raise SecrecyError("the kernel gives no random bytes for a key (getrandom)")

    def erase(self) -> None:
        """Overwrite it; nobody uses it any more. Harmless when done twice."""
        ctypes.memset(self.address, 0, KEY_BYTES)
