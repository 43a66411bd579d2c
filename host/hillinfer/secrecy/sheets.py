# SPDX-License-Identifier: Apache-2.0
"""Sealing a sheet: the header page and the body that say what an extent holds.

A sealed header page:

    magic | version | identity of the store | id of the data key | epoch | sizes
    | tag of the header | tag of the body | the header, sealed

What is in the clear says how long the extent is, which an index that is made anew and a listing
without a key go by, and which key opens it. All of it is associated data, together with the place
and the number of the sheet. Each sheet has an epoch of its own and so a key of its own (see
`pages.py`), whose nonces are 0 for the header and 1 for the body.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.secrecy.library import (
    NONCE_BYTES,
    TAG_BYTES,
    WrongTagError,
    aes_gcm,
    derived,
    wrong_tag,
)
from hillinfer.secrecy.pages import EPOCH_BYTES, Place

_MAGIC = b"HillKVe\n"
_VERSION = 1
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
        if len(page) != PAGE_BYTES or not page.startswith(_MAGIC):
            return None
        _, version, own, key_id, epoch, *sizes = _CLEAR.unpack_from(page)
        if version != _VERSION or own != pool:
            return None
        layers, row_bytes, shadow_bytes = sizes
        return cls(key_id, epoch, (layers, row_bytes, shadow_bytes))

    def packed(self, pool: bytes) -> bytes:
        """Return its bytes."""
        return _CLEAR.pack(_MAGIC, _VERSION, pool, self.key_id, self.epoch, *self.sizes)


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
