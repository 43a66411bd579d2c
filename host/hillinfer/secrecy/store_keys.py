# SPDX-License-Identifier: Apache-2.0
"""Encryption as a store uses it: sealing chunks and sheets by the data key of their salt."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import PAGE_BYTES
from hillinfer.secrecy.key_sources import OPTIONS, KeySource, WithoutKey
from hillinfer.secrecy.key_table import DataKey, KeyTable
from hillinfer.secrecy.library import (
    NONCE_BYTES,
    TAG_BYTES,
    SecrecyError,
    WrongTagError,
    aes_gcm,
    derived,
    wrong_tag,
)
from hillinfer.secrecy.pages import EPOCH_BYTES, PageCipher, PageLayout, Pages, Place, PlainPages

# --- Sealed sheets ---

# A sealed header page:
#
#     magic | version | identity of the store | id of the data key | epoch | sizes
#     | tag of the header | tag of the body | the header, sealed
#
# What is in the clear says how long the extent is, which an index that is made anew and a listing
# without a key go by, and which key opens it. All of it is associated data, together with the place
# and the number of the sheet. Each sheet has an epoch of its own and so a key of its own (see
# `pages.py`), whose nonces are 0 for the header and 1 for the body.
_SHEET_MAGIC = b"HillKVe\n"
_SHEET_VERSION = 1
_CLEAR = struct.Struct("<8sI16s16s16sIII")
_HEAD_BYTES = _CLEAR.size + 2 * TAG_BYTES
# The last bytes of a header page are its checksum; zeros are between it and what it says.
_END_BYTES = 4
# Bytes at the beginning of a header page that it may use.
SHEET_TEXT_BYTES = PAGE_BYTES - _HEAD_BYTES - _END_BYTES
_HEADER_NONCE, _BODY_NONCE = (number.to_bytes(NONCE_BYTES, "big") for number in range(2))

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Envelope:
    """What a sealed sheet says in the clear.

    Parameters
    ----------
    key_id
        Of the data key, 16 bytes.
    epoch
        Of the sheet, 16 bytes.
    sizes
        Layers, bytes of a row, bytes of a shadow.
    """

    key_id: bytes
    epoch: bytes
    sizes: Sizes

    @classmethod
    def read(cls, page: bytes, pool: bytes) -> Envelope | None:
        """Return what a header page says, None where it is no sealed one of this store."""
        if len(page) != PAGE_BYTES or not page.startswith(_SHEET_MAGIC):
            return None
        _, version, own, key_id, epoch, *sizes = _CLEAR.unpack_from(page)
        if version != _SHEET_VERSION or own != pool:
            return None
        layers, row_bytes, shadow_bytes = sizes
        return cls(key_id, epoch, (layers, row_bytes, shadow_bytes))

    def packed(self, pool: bytes) -> bytes:
        """Return its bytes."""
        return _CLEAR.pack(_SHEET_MAGIC, _SHEET_VERSION, pool, self.key_id, self.epoch, *self.sizes)


def seal_sheet(
    key_id: bytes, key: bytes, place: Place, slot: int, sizes: Sizes, page: bytes, body: bytes
) -> tuple[bytes, bytes]:
    """Return the sealed header page and the sealed body of a sheet, as long as they were.

    Parameters
    ----------
    key_id, key
        The data key, and what it is called.
    place, slot
        Of the extent, and which of its two sheets it is.
    sizes
        Said in the clear.
    page, body
        The sheet; of the page the first `SHEET_TEXT_BYTES` and the last four bytes are used.
    """
    envelope = Envelope(key_id, secrets.token_bytes(EPOCH_BYTES), sizes)
    clear = envelope.packed(place.pool)
    about = clear + place.packed + bytes([slot])
    if any(page[SHEET_TEXT_BYTES:-_END_BYTES]):
        raise ValueError("a header is longer than a sealed page holds")
    text = page[:SHEET_TEXT_BYTES] + page[-_END_BYTES:]
    cipher = aes_gcm(_sheet_key(key, envelope, place))
    sealed = cipher.encrypt(_HEADER_NONCE, text, about)
    sealed_body = cipher.encrypt(_BODY_NONCE, body, about)
    tags = sealed[-TAG_BYTES:] + sealed_body[-TAG_BYTES:]
    return clear + tags + sealed[:-TAG_BYTES], sealed_body[:-TAG_BYTES]


def open_sheet(
    key: bytes, envelope: Envelope, place: Place, slot: int, page: bytes, body: bytes
) -> tuple[bytes, bytes]:
    """Return the header page and the body that were sealed.

    Raises
    ------
    WrongTagError
        Where they are not what was sealed at this place with this key.
    """
    about = envelope.packed(place.pool) + place.packed + bytes([slot])
    cipher = aes_gcm(_sheet_key(key, envelope, place))
    tags = page[_CLEAR.size : _HEAD_BYTES]
    try:
        text = cipher.decrypt(_HEADER_NONCE, page[_HEAD_BYTES:] + tags[:TAG_BYTES], about)
        opened = cipher.decrypt(_BODY_NONCE, body + tags[TAG_BYTES:], about)
    except wrong_tag() as error:
        raise WrongTagError("a sheet") from error
    head, end = text[:-_END_BYTES], text[-_END_BYTES:]
    return head.ljust(PAGE_BYTES - _END_BYTES, b"\0") + end, opened


def _sheet_key(key: bytes, envelope: Envelope, place: Place) -> bytes:
    return derived(key, envelope.epoch, b"hillinfer sheet 1" + place.packed)


# --- Keys of chunks ---


class Sealing(Protocol):
    """How the chunks of one salt are kept."""

    @property
    def tag_bytes(self) -> int:
        """Bytes that each page has in its extent's tag plane."""

    @property
    def hash_key(self) -> bytes:
        """What hashes of prefixes are keyed by; empty: they are not."""

    def begin(self, place: Place, layout: PageLayout) -> Pages:
        """Return what the pages of an extent go through that is filled from its beginning."""

    def pages(self, place: Place, layout: PageLayout, epochs: bytes) -> Pages:
        """Return what the pages of a filled extent go through, with its sheet's epochs."""

    def sealed_sheet(
        self, place: Place, slot: int, sizes: Sizes, page: bytes, body: bytes
    ) -> tuple[bytes, bytes]:
        """Return a header page and a body as they are written."""


class Plain:
    """Everything lies on the drive as it is."""

    tag_bytes = 0
    hash_key = b""

    def begin(self, place: Place, layout: PageLayout) -> Pages:
        """Return what leaves pages as they are."""
        return PlainPages()

    def pages(self, place: Place, layout: PageLayout, epochs: bytes) -> Pages:
        """Return what leaves pages as they are."""
        return PlainPages()

    def sealed_sheet(
        self, place: Place, slot: int, sizes: Sizes, page: bytes, body: bytes
    ) -> tuple[bytes, bytes]:
        """Return the same bytes."""
        return page, body


class Sealed:
    """Everything is sealed under one data key.

    Parameters
    ----------
    key
        The salt's.
    """

    tag_bytes = TAG_BYTES

    def __init__(self, key: DataKey) -> None:
        self._key = key
        self.hash_key = key.hash_key

    def begin(self, place: Place, layout: PageLayout) -> Pages:
        """Return what seals the pages of an extent that is filled from its beginning."""
        return PageCipher.begun(self._key.secret, place, layout)

    def pages(self, place: Place, layout: PageLayout, epochs: bytes) -> Pages:
        """Return what opens the pages of a filled extent."""
        return PageCipher(self._key.secret, place, layout, epochs)

    def sealed_sheet(
        self, place: Place, slot: int, sizes: Sizes, page: bytes, body: bytes
    ) -> tuple[bytes, bytes]:
        """Return a header page and a body, sealed."""
        return seal_sheet(self._key.number, self._key.secret, place, slot, sizes, page, body)


# A tuple, because a lookup makes one for every chunk.
class OpenedSheet(NamedTuple):
    """A sheet as it was before it was sealed.

    Parameters
    ----------
    page, body
        Its header page and body.
    sealing
        How its chunk is kept.
    """

    page: bytes
    body: bytes
    sealing: Sealing


class StoreKeys(Protocol):
    """The keys of one open store."""

    @property
    def tag_bytes(self) -> int:
        """As in `Sealing`, of all salts."""

    def found(self, salt: bytes) -> Sealing | None:
        """Return how a salt's chunks are kept, None where it has none.

        Raises
        ------
        SecrecyError
            Where its key cannot be had.
        """

    def made(self, salt: bytes) -> Sealing:
        """Return how a salt's chunks are kept, made anew where it has none; errors as above."""

    def forget(self, salt: bytes) -> bytes | None:
        """Throw a salt's key away and return its number, None where it has none; errors so too."""

    def opened(self, place: Place, slot: int, page: bytes, body: bytes) -> OpenedSheet | None:
        """Return a sheet as it was before it was sealed, None where it is none that can be opened.

        Raises
        ------
        SecrecyError
            Where there is no key to try.
        """


class NoKeys:
    """A store whose bytes lie on the drive as they are."""

    tag_bytes = 0

    def found(self, salt: bytes) -> Sealing:
        """Return that they are plain."""
        return Plain()

    def made(self, salt: bytes) -> Sealing:
        """Return that they are plain."""
        return Plain()

    def forget(self, salt: bytes) -> bytes:
        """Refuse, with SecrecyError: there are no keys to forget."""
        raise SecrecyError(
            "the store is not encrypted, so no key can be forgotten: hillinfer store rm removes "
            "what it holds"
        )

    def opened(self, place: Place, slot: int, page: bytes, body: bytes) -> OpenedSheet:
        """Return the same bytes."""
        return OpenedSheet(page, body, Plain())


class OwnKeys:
    """A store whose table of keys is open.

    Parameters
    ----------
    table
        The open one.

    Attributes
    ----------
    table
        The same.
    """

    tag_bytes = TAG_BYTES

    def __init__(self, table: KeyTable) -> None:
        self.table = table

    def found(self, salt: bytes) -> Sealing | None:
        """Return how a salt's chunks are kept, None where it has none."""
        key = self.table.find(salt)
        return None if key is None else Sealed(key)

    def made(self, salt: bytes) -> Sealing:
        """Return how a salt's chunks are kept, under a new key where it has none."""
        return Sealed(self.table.get(salt))

    def forget(self, salt: bytes) -> bytes | None:
        """Throw a salt's key away and return its number; None where it has none."""
        return self.table.forget(salt)

    def opened(self, place: Place, slot: int, page: bytes, body: bytes) -> OpenedSheet | None:
        """Return a sheet as it was before it was sealed, None where nothing opens it."""
        envelope = Envelope.read(page, place.pool)
        key = None if envelope is None else self.table.numbered(envelope.key_id)
        if envelope is None or key is None:
            return None
        try:
            return OpenedSheet(
                *open_sheet(key.secret, envelope, place, slot, page, body), Sealed(key)
            )
        except WrongTagError:
            return None


class ShutKeys:
    """An encrypted store without its key: the index tells sizes, and nothing else can be had."""

    tag_bytes = TAG_BYTES

    def found(self, salt: bytes) -> Sealing:
        """Refuse, with SecrecyError."""
        raise _shut()

    def made(self, salt: bytes) -> Sealing:
        """Refuse, with SecrecyError."""
        raise _shut()

    def forget(self, salt: bytes) -> bytes:
        """Refuse, with SecrecyError."""
        raise _shut()

    def opened(self, place: Place, slot: int, page: bytes, body: bytes) -> OpenedSheet:
        """Refuse, with SecrecyError."""
        raise _shut()


def _shut() -> SecrecyError:
    return SecrecyError(
        f"what the store holds is encrypted: give its key with {OPTIONS} of a command that takes "
        "one, like hillinfer store verify"
    )


def opened_keys(
    path: Path,
    cipher: str,
    pool: bytes,
    key: KeySource | WithoutKey | None,
    calls: DriveCalls | None = None,
) -> StoreKeys:
    """Return the keys of a store that is opened.

    Parameters
    ----------
    path
        Of its table of keys, whether it has one or not.
    cipher
        What it is encrypted by, empty where it is not.
    pool
        Its identity.
    key
        What its user gave.
    calls
        How the drive is reached.

    Raises
    ------
    SecrecyError
        Where the key is missing, is another one, or does not belong there.
    """
    if key is None and cipher:
        raise SecrecyError(f"the store {path.parent} is encrypted: give its key with {OPTIONS}")
    if key is None or isinstance(key, WithoutKey):
        return ShutKeys() if cipher else NoKeys()
    return OwnKeys(KeyTable.of_store(path, cipher, pool, key, calls))
