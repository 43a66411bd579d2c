# SPDX-License-Identifier: Apache-2.0
"""Sealing the pages of a cold pool, whose places are written again and again while it lives.

Each page of 4 KiB is sealed alone with AES-256-GCM. The key is random, drawn for one pool, and lies
in memory alone, so whatever is left on a drive says nothing once the process has ended. Tags lie in
memory, too: a page that a drive has lost, mixed up or kept of an older write does not open.

Why no nonce is used twice: it is made of the number of the file, that of the page, and how often
the page has been sealed. That is counted before the page is, whatever becomes of it then.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, private_memory, round_up
from hillinfer.drive.landing import Seals
from hillinfer.drive.shared_files import ReadFile
from hillinfer.errors import SetupWarning
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.library import NativeError, native_library
from hillinfer.native.structures import PageRun, PageSeal
from hillinfer.secrecy.library import KEY_BYTES, TAG_BYTES, SecrecyError, WrongTagError
from hillinfer.settings import Encryption, Settings
from hillinfer_model.kernel_spec import GROUP_TOKENS

# --- A key in memory alone ---

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


# What the library seals at once, whatever pages the machine has.
SEALED_PAGE_BYTES = 4096
# Of each page in memory: its tag, and how often it was sealed.
TABLE_BYTES = TAG_BYTES + 4
_PAGES_AT_ONCE = 64
_MOST_WRITES = (1 << 32) - 1
# A page's number in a nonce is that of its file in front of that in the file.
_FILE_SHIFT = 44


@dataclass(frozen=True)
class _Tables:
    """Tags, uint8 (pages, 16), and how often each page was sealed, uint32 (pages,)."""

    tags: NDArray[np.uint8]
    writes: NDArray[np.uint32]

    @classmethod
    def of(cls, pages: int) -> _Tables:
        return cls(np.zeros((pages, TAG_BYTES), np.uint8), np.zeros(pages, np.uint32))

    def __len__(self) -> int:
        return len(self.writes)


# --- One file ---


class ColdPages:
    """What the pages of one file of a cold pool go through, on their way to the drive and back.

    Any number of threads may open pages that nobody seals meanwhile; one at a time seals.

    Parameters
    ----------
    key
        Of the pool.
    number
        Of the file in the pool.
    accountant
        Counts the tables.
    """

    def __init__(self, key: LockedKey, number: int, accountant: Accountant) -> None:
        self._key = key
        self._first = number << _FILE_SHIFT
        self._accountant = accountant
        self._tables = _Tables.of(0)
        # While a table grows nobody writes to the old one.
        self._changing = threading.Lock()

    def cover(self, byte_count: int) -> None:
        """Make room for the tags of the first bytes of the file.

        Raises
        ------
        BudgetError
            Where the tables do not fit.
        """
        pages, old = covered_pages(byte_count), len(self._tables)
        if pages <= old:
            return
        # By an eighth at least: what grows in many small steps is not copied at each of them.
        pages = max(pages, round_up(old + old // 8, _PAGES_AT_ONCE))
        # While one grows the old one is there as well.
        self._accountant.take(Part.OTHER, pages * TABLE_BYTES)
        larger = _Tables.of(pages)
        with self._changing:
            larger.tags[:old] = self._tables.tags
            larger.writes[:old] = self._tables.writes
            self._tables = larger
        self._accountant.give(Part.OTHER, old * TABLE_BYTES)

    def seal(self, at: int, data: NDArray[np.uint8]) -> None:
        """Seal pages in their place.

        Parameters
        ----------
        at
            Where in the file they go, in bytes.
        data
            Whole pages, uint8, contiguous.

        Raises
        ------
        SecrecyError
            Where a place was written so often that a nonce would come again.
        """
        with self._changing:
            first, count = self._span(at, data)
            writes = self._tables.writes[first : first + count]
            if (writes == _MOST_WRITES).any():
                raise SecrecyError(
                    "a place of the cold pool was written 4,294,967,295 times, and cannot be "
                    "sealed once more: open a new cache"
                )
            writes += 1
            done = self._pass(self._tables, first, count, data, seals=1)
        if done != count:
            raise NativeError("libcrypto sealed less than it was given")

    def open(self, at: int, data: NDArray[np.uint8]) -> None:
        """Open pages in their place, as they were read.

        Raises
        ------
        WrongTagError
            Where they are not what was sealed there last; the bytes are worth nothing then.
        """
        first, count = self._span(at, data)
        done = self._pass(self._tables, first, count, data, seals=0)
        if done != count:
            raise WrongTagError(f"page {first + done}")

    @property
    def seals(self) -> Seals:
        """What the native library opens pages with that are settled by now."""
        tables = self._tables
        table = PageSeal(
            self._key.address,
            tables.tags.ctypes.data,
            tables.writes.ctypes.data,
            0,
            len(tables),
            self._first,
        )
        return Seals(ctypes.addressof(table), 1, 0, (table, tables, self._key))

    def _span(self, at: int, data: NDArray[np.uint8]) -> tuple[int, int]:
        first, rest = divmod(at, SEALED_PAGE_BYTES)
        count, tail = divmod(data.nbytes, SEALED_PAGE_BYTES)
        if rest or tail or first + count > len(self._tables) or not data.flags.c_contiguous:
            raise ValueError(f"{data.nbytes} bytes at {at} are no whole pages that are covered")
        return first, count

    def _pass(
        self, tables: _Tables, first: int, count: int, data: NDArray[np.uint8], seals: int
    ) -> int:
        run = PageRun(
            self._key.address,
            data.ctypes.data,
            tables.tags[first:].ctypes.data,
            tables.writes[first:].ctypes.data,
            self._first + first,
            count,
            seals,
        )
        return native_library().cipher_pages(run)


class PoolKey:
    """Seals the files of one cold pool, under one key that is drawn for it.

    Parameters
    ----------
    accountant
        Counts tags.

    Raises
    ------
    SecrecyError
        Where there is nothing to seal with, or no key.
    """

    def __init__(self, accountant: Accountant) -> None:
        check_cipher()
        self._accountant = accountant
        self._key = LockedKey()
        self._files = 0

    def file(self) -> ColdPages:
        """Return what seals and opens the pages of one more file."""
        self._files += 1
        return ColdPages(self._key, self._files, self._accountant)

    def erase(self) -> None:
        """Erase the key: what lies on the drive says nothing from here on."""
        self._key.erase()


# --- The files of rows, one per layer ---


class RowPages(Protocol):
    """How the own files of a cold pool are kept."""

    are_sealed: bool
    """Whether nobody can read them by their descriptors."""

    def cover(self, groups: int) -> None:
        """Make room in memory for what belongs to the first groups of each file; BudgetError."""

    def as_written(
        self, layer: int, data: memoryview, offset: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield whole pages as they go to the drive, and where, each valid until the next.

        The bytes that are given stay as they are. One thread at a time.
        """

    def open(self, file: ReadFile, layer: int, piece: memoryview, offset: int) -> None:
        """Open whole pages in their place, as they were read; raise the file's error of others."""

    def seals(self, layer: int) -> Seals | None:
        """Return what opens the pages of a layer's file while rows land; None for nothing."""


class PlainRowPages:
    """They lie on the drive as they are."""

    are_sealed = False

    def cover(self, groups: int) -> None:
        """Nothing belongs to them."""

    def as_written(
        self, layer: int, data: memoryview, offset: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the same bytes."""
        yield offset, data

    def open(self, file: ReadFile, layer: int, piece: memoryview, offset: int) -> None:
        """Leave the bytes as they are."""

    def seals(self, layer: int) -> None:
        """Return that nothing opens them."""


class SealedRowPages:
    """They are sealed.

    Parameters
    ----------
    key
        Of the pool.
    layers, row_bytes
        One file for each layer; bytes of a row.
    buffer_bytes
        Most bytes that are sealed before they are written, whole pages.
    """

    are_sealed = True

    def __init__(self, key: PoolKey, layers: int, row_bytes: int, buffer_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._files = [key.file() for _ in range(layers)]
        self._buffer = aligned_buffer(buffer_bytes)[:buffer_bytes]

    def cover(self, groups: int) -> None:
        """Make room for tags; see `RowPages`."""
        # As many more at a time as tables of rows have.
        rows = round_up(groups * GROUP_TOKENS, TABLE_GROWTH_ROWS)
        for own in self._files:
            own.cover(rows * self._row_bytes)

    def as_written(
        self, layer: int, data: memoryview, offset: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield sealed pages; see `RowPages`."""
        for begin in range(0, len(data), len(self._buffer)):
            piece = data[begin : begin + len(self._buffer)]
            sealed = self._buffer[: len(piece)]
            sealed[:] = np.frombuffer(piece, np.uint8)
            self._files[layer].seal(offset + begin, sealed)
            yield offset + begin, sealed.data

    def open(self, file: ReadFile, layer: int, piece: memoryview, offset: int) -> None:
        """Open pages; see `RowPages`."""
        try:
            self._files[layer].open(offset, np.frombuffer(piece, np.uint8))
        except WrongTagError as error:
            raise file.changed(len(piece), offset) from error

    def seals(self, layer: int) -> Seals:
        """Return what opens the pages of a layer's file."""
        return self._files[layer].seals


# --- What it takes ---


def table_bytes(byte_count: int) -> int:
    """Return the bytes of what memory has of a sealed file of so many bytes."""
    return covered_pages(byte_count) * TABLE_BYTES


def covered_pages(byte_count: int) -> int:
    """Return for how many pages there is room where so many bytes of a file are covered."""
    return round_up(-(-byte_count // SEALED_PAGE_BYTES), _PAGES_AT_ONCE)


def with_store(settings: Settings, cipher: str) -> Settings:
    """Return settings of caches beside a store: a plain cold pool would tell what it has sealed.

    Where this machine cannot seal one the cold pool stays plain, with a warning.

    Parameters
    ----------
    settings
        As chosen.
    cipher
        What the store is encrypted by, empty where it is not.
    """
    if settings.encrypt_cold_pool is not Encryption.AUTO or not cipher:
        return settings
    try:
        check_cipher()
    except SecrecyError as error:
        warnings.warn(
            f"rows of the encrypted store lie plainly in the cold pool: {error}",
            SetupWarning,
            stacklevel=3,
        )
        return settings
    return settings.changed(encrypt_cold_pool=Encryption.YES)


def check_cipher() -> None:
    """Raise SecrecyError where this machine cannot seal a cold pool."""
    if not native_library().has_page_cipher:
        raise SecrecyError(
            "the cold pool cannot be encrypted: the system has no libcrypto.so.3 (OpenSSL 3), "
            "which seals its pages; install it, or leave --encrypt-cold-pool out and put "
            "--cold-dir on an encrypted drive"
        )
