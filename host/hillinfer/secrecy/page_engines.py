# SPDX-License-Identifier: Apache-2.0
"""What seals and opens the pages of one key: OpenSSL, the system's or the package's own.

Both give the same bytes. The system's library is called page after page in C++, which lets other
threads run Python meanwhile and costs less for each page.
"""

from __future__ import annotations

from importlib import metadata
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.native.library import NativeError, native_library
from hillinfer.native.structures import PageRun
from hillinfer.secrecy.library import (
    NONCE_BYTES,
    PACKAGE,
    TAG_BYTES,
    WrongTagError,
    aes_gcm,
    wrong_tag,
)


class PageEngine(Protocol):
    """Seals and opens pages in their place; the number of a page is its nonce."""

    @property
    def name(self) -> str:
        """What does it, for reports."""

    def seal(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Seal pages under a key.

        Parameters
        ----------
        key
            32 bytes.
        first
            Number of the first page.
        pages
            uint8, whole pages, contiguous.
        tags
            uint8 (pages, 16), contiguous; filled in.
        """

    def open(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Open pages; parameters as of `seal`.

        Raises
        ------
        WrongTagError
            Where a tag does not fit.
        """


class PackagedPages:
    """By the package `cryptography`."""

    @property
    def name(self) -> str:
        """The package and its version."""
        return f"{PACKAGE} {metadata.version(PACKAGE)}"

    def seal(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Seal pages; parameters as of `PageEngine.seal`."""
        cipher, scratch = aes_gcm(key), bytearray(PAGE_BYTES + TAG_BYTES)
        both = np.frombuffer(scratch, np.uint8)
        for number, page in enumerate(pages.reshape(-1, PAGE_BYTES)):
            cipher.encrypt_into(_nonce(first + number), page.data, None, scratch)
            page[:] = both[:PAGE_BYTES]
            tags[number] = both[PAGE_BYTES:]

    def open(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Open pages; parameters and errors as of `PageEngine.open`."""
        cipher, scratch = aes_gcm(key), bytearray(PAGE_BYTES + TAG_BYTES)
        both, wrong = np.frombuffer(scratch, np.uint8), wrong_tag()
        for number, page in enumerate(pages.reshape(-1, PAGE_BYTES)):
            both[:PAGE_BYTES] = page
            both[PAGE_BYTES:] = tags[number]
            try:
                cipher.decrypt_into(_nonce(first + number), scratch, None, page.data)
            except wrong as error:
                raise WrongTagError(f"page {first + number}") from error


class SystemPages:
    """By the system's libcrypto, which the native library calls."""

    name = "the system's libcrypto"

    def seal(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Seal pages; parameters as of `PageEngine.seal`."""
        if self._done(key, first, pages, tags, 1) != len(tags):
            raise NativeError("libcrypto sealed less than it was given")

    def open(
        self, key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8]
    ) -> None:
        """Open pages; parameters and errors as of `PageEngine.open`."""
        done = self._done(key, first, pages, tags, 0)
        if done != len(tags):
            raise WrongTagError(f"page {first + done}")

    @staticmethod
    def _done(
        key: bytes, first: int, pages: NDArray[np.uint8], tags: NDArray[np.uint8], seals: int
    ) -> int:
        if pages.nbytes != len(tags) * PAGE_BYTES or tags.nbytes != len(tags) * TAG_BYTES:
            raise ValueError(f"{tags.shape} tags for {pages.nbytes} bytes")
        if not (pages.flags.c_contiguous and tags.flags.c_contiguous):
            raise ValueError("pages and tags lie without gaps")
        run = PageRun(key, pages.ctypes.data, tags.ctypes.data, None, first, len(tags), seals)
        return native_library().cipher_pages(run)


def page_engine() -> PageEngine:
    """Return the faster one of those that are there.

    Keys are derived and wrapped by the package in any case, so that it must be installed.
    """
    try:
        return SystemPages() if native_library().has_page_cipher else PackagedPages()
    except NativeError:
        return PackagedPages()


def _nonce(index: int) -> bytes:
    return index.to_bytes(NONCE_BYTES, "big")
