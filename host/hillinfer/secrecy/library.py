# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM, HKDF and scrypt of the optional package `cryptography`, and errors of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hillinfer.errors import HillInferError

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
