# SPDX-License-Identifier: Apache-2.0
"""What encrypts: AES-256-GCM, HKDF and scrypt of optional libraries, and errors of keys.

Pages are sealed by the package `cryptography` or by the system's OpenSSL; both give the same bytes.
The system's library is called page after page in C++, which lets other threads run Python meanwhile
and costs less for each page.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.errors import HillInferError
from hillinfer.native.library import NativeError, native_library
from hillinfer.native.structures import PageRun

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
# What a page is sealed by, as stores and reports name it.
CIPHER = "AES-256-GCM"
PACKAGE = "cryptography"


class SecrecyError(HillInferError):
    """A key is missing, is the wrong one, or cannot be used."""


class WrongKeyError(SecrecyError):
    """A key is not the one that something was sealed by."""


class WrongTagError(Exception):
    """Bytes are not those that were sealed at this place, or not with this key."""


def aes_gcm(key: bytes) -> AESGCM:
    """Return AES-256-GCM under a key of 32 bytes; any number of threads may use it.

    Raises
    ------
    SecrecyError
        Where the library is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise _missing() from error
    return AESGCM(key)


def wrong_tag() -> type[Exception]:
    """Return what the library raises where a tag does not fit."""
    try:
        from cryptography.exceptions import InvalidTag
    except ImportError as error:
        raise _missing() from error
    return InvalidTag


def derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes that follows from another by HKDF-SHA-256 (RFC 5869).

    Parameters
    ----------
    secret
        Of full entropy.
    salt, purpose
        Different ones give keys that have nothing in common.
    """
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise _missing() from error
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(secret)


@dataclass(frozen=True)
class Stretch:
    """How much work scrypt (RFC 7914) makes of trying one passphrase.

    Parameters
    ----------
    salt
        Random.
    cost, blocks, lanes
        n, r and p of scrypt; it takes 128 * n * r bytes of memory.
    """

    salt: bytes
    cost: int = 1 << 17
    blocks: int = 8
    lanes: int = 1

    def key(self, passphrase: bytes) -> bytes:
        """Return the key of 32 bytes that a passphrase makes."""
        try:
            from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
        except ImportError as error:
            raise _missing() from error
        return Scrypt(self.salt, KEY_BYTES, self.cost, self.blocks, self.lanes).derive(passphrase)


def _missing() -> SecrecyError:
    return SecrecyError(
        f"encryption needs the package {PACKAGE}, which is not installed: "
        "pip install 'hillinfer[encryption]'"
    )


# --- What seals and opens the pages of one key ---


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
