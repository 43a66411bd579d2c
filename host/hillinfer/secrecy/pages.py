# SPDX-License-Identifier: Apache-2.0
"""Sealing the pages of one extent with AES-256-GCM, and opening them where they landed.

A page of 4 KiB is sealed alone, because rows are read at random. Its tag of 16 bytes lies in the
extent's tag plane, in the clear: a tag tells nothing, and the tags of what is published stay the
same bytes when more is written behind it, so a plane that was half written still has them.

Why no nonce is used twice with one key:

- Whoever begins to fill an extent, or goes on in one, draws an epoch: 16 random bytes. The key of
  its pages is derived (HKDF-SHA-256) from the salt's data key, the epoch, the store's identity, the
  drive and the place of the extent. The nonce is the number of the page in the extent.
- So two pages could meet only in one epoch, and in one epoch `seal` takes a page once.
- Nothing of this is counted, so nothing that a kill, a power cut, an index that is made anew or
  a copy that is put back makes a counter forget can repeat one. Generations of the index are such
  a counter: they say which sheet is newer, and no nonce depends on them.

The epochs lie in the sealed sheet, one for each group of an extent. A page of another place, of
another chunk or of an older writer has another key, so its tag does not fit.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.secrecy.library import KEY_BYTES, TAG_BYTES, PageEngine, derived, page_engine

EPOCH_BYTES = 16
_NO_EPOCH = bytes(EPOCH_BYTES)
_PLACE = struct.Struct("<16sIQ")


@dataclass(frozen=True)
class Place:
    """Where an extent lies.

    Parameters
    ----------
    pool
        Identity of the store, 16 bytes.
    drive, unit
        Number of the drive, and where the extent begins on it.
    """

    pool: bytes
    drive: int
    unit: int

    @property
    def packed(self) -> bytes:
        """It as bytes, of which no two places have the same."""
        return _PLACE.pack(self.pool, self.drive, self.unit)


@dataclass(frozen=True)
class PageLayout:
    """Which pages of an extent are sealed one by one.

    Parameters
    ----------
    first
        Number of the first one in the extent; the others follow.
    slots
        uint8, for each of them which of the extent's epochs it belongs to: pages that are written
        by one writer together have the same.
    epochs
        How many epochs there are.
    """

    first: int
    slots: NDArray[np.uint8]
    epochs: int

    @classmethod
    def of_one_slot(cls, pages: int) -> PageLayout:
        """Return the layout of pages that one writer writes."""
        return cls(0, np.zeros(pages, np.uint8), 1)

    @property
    def tag_bytes(self) -> int:
        """Bytes of all tags."""
        return len(self.slots) * TAG_BYTES


class Pages(Protocol):
    """What whole pages of one extent go through, on their way to the drive and back."""

    @property
    def wants_tags(self) -> bool:
        """Whether `take_tags` must be called before `open`."""

    @property
    def epochs(self) -> bytes:
        """What its sheet keeps for whoever opens the pages."""

    @property
    def tags(self) -> bytes:
        """What lies in the extent's tag plane."""

    def take_tags(self, tags: NDArray[np.uint8]) -> None:
        """Take the tag plane as it was read."""

    def go_on(self) -> Pages:
        """Return what writes behind what is written, with a new epoch."""

    def seal(self, at: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what is to be written, page-aligned.

        Parameters
        ----------
        at
            Where in the extent, in bytes.
        data
            Whole pages, uint8, contiguous; they stay as they are.
        """

    def open(self, at: int, data: NDArray[np.uint8]) -> None:
        """Open whole pages in their place, as they were read.

        Raises
        ------
        WrongTagError
            Where they are not what was sealed there; the bytes are worth nothing then.
        """


class PlainPages:
    """Pages that lie on the drive as they are."""

    wants_tags = False
    epochs = b""
    tags = b""

    def take_tags(self, tags: NDArray[np.uint8]) -> None:
        """Take nothing: there are none."""

    def go_on(self) -> PlainPages:
        """Return itself."""
        return self

    def seal(self, at: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same bytes."""
        return data

    def open(self, at: int, data: NDArray[np.uint8]) -> None:
        """Leave the bytes as they are."""


@dataclass(frozen=True)
class SealedPart:
    """What opens the pages of one slot of an extent.

    Parameters
    ----------
    key_address
        Where their key lies, as long as the cipher lives.
    tags
        uint8 (pages, 16), of all pages of the extent that are sealed one by one.
    start
        The byte of the extent that the first of them begins at; its number is 0.
    """

    key_address: int
    tags: NDArray[np.uint8]
    start: int


class PageCipher:
    """Seals and opens the pages of one extent.

    Any number of threads may open; one at a time seals.

    Parameters
    ----------
    key
        The data key, 32 bytes.
    place
        Of the extent.
    layout
        Its pages.
    epochs
        As its sheet has them, one after the other.
    engine
        What does it; the faster one of those that are there where None.
    """

    def __init__(
        self,
        key: bytes,
        place: Place,
        layout: PageLayout,
        epochs: bytes,
        engine: PageEngine | None = None,
    ) -> None:
        self._key = key
        self._place = place
        self._layout = layout
        self._epochs = [
            epochs[start : start + EPOCH_BYTES] for start in range(0, len(epochs), EPOCH_BYTES)
        ]
        self._engine = engine or page_engine()
        self._tags: NDArray[np.uint8] | None = None
        self._own = _NO_EPOCH
        self._sealed = np.zeros(0, bool)
        # By epoch: groups that one writer wrote have one in common.
        self._page_keys: dict[bytes, bytes] = {}

    @classmethod
    def begun(
        cls, key: bytes, place: Place, layout: PageLayout, engine: PageEngine | None = None
    ) -> PageCipher:
        """Return what fills an empty extent; parameters as above."""
        cipher = cls(key, place, layout, _NO_EPOCH * layout.epochs, engine)
        cipher._tags = np.zeros((len(layout.slots), TAG_BYTES), np.uint8)
        return cipher.go_on()

    @property
    def wants_tags(self) -> bool:
        """Whether `take_tags` must be called before `open`."""
        return self._tags is None

    @property
    def epochs(self) -> bytes:
        """The epoch of each slot, zeros where nothing was sealed."""
        return b"".join(self._epochs)

    @property
    def tags(self) -> bytes:
        """All tags."""
        return b"" if self._tags is None else self._tags.tobytes()

    def take_tags(self, tags: NDArray[np.uint8]) -> None:
        """Take the tag plane as it was read."""
        own = tags.reshape(-1)[: self._layout.tag_bytes]
        self._tags = own.reshape(-1, TAG_BYTES).copy()

    def go_on(self) -> PageCipher:
        """Return what writes behind what is written, with a new epoch."""
        other = PageCipher(self._key, self._place, self._layout, self.epochs, self._engine)
        other._tags = None if self._tags is None else self._tags.copy()
        other._own = secrets.token_bytes(EPOCH_BYTES)
        other._sealed = np.zeros(len(self._layout.slots), bool)
        return other

    def seal(self, at: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what is to be written, page-aligned; parameters as those of `Pages.seal`.

        Raises
        ------
        ValueError
            Where a page is sealed a second time, or `go_on` has not begun an epoch.
        """
        first, count = self._span(at, data)
        if self._tags is None or not len(self._sealed):
            raise ValueError("pages are sealed in an epoch of their own: go_on begins one")
        if self._sealed[first : first + count].any():
            raise ValueError(f"pages at {at} were sealed already: a nonce would repeat")
        self._sealed[first : first + count] = True
        for slot in np.unique(self._layout.slots[first : first + count]).tolist():
            self._epochs[slot] = self._own
        sealed = aligned_buffer(data.nbytes)[: data.nbytes]
        sealed[:] = data.reshape(-1)
        tags = self._tags[first : first + count]
        self._engine.seal(self._page_key(self._own), first, sealed, tags)
        return sealed

    def open(self, at: int, data: NDArray[np.uint8]) -> None:
        """Open whole pages in their place; parameters and errors as those of `Pages.open`."""
        first, count = self._span(at, data)
        if self._tags is None:
            raise ValueError("tags come first: take_tags")
        pages = data.reshape(-1)
        start = 0
        for epoch, run in groupby(self._epochs_of(first, count)):
            stop = start + len(list(run))
            own = pages[start * PAGE_BYTES : stop * PAGE_BYTES]
            tags = self._tags[first + start : first + stop]
            self._engine.open(self._page_key(epoch), first + start, own, tags)
            start = stop

    @property
    def tag_bytes(self) -> int:
        """Bytes of all tags."""
        return self._layout.tag_bytes

    def part(self, slot: int) -> SealedPart:
        """Return what opens the pages of a slot that was sealed, for who opens them natively."""
        if self._tags is None:
            raise ValueError("tags come first: take_tags")
        key = ctypes.c_char_p(self._page_key(self._epochs[slot]))
        address = ctypes.cast(key, ctypes.c_void_p).value
        assert address is not None
        return SealedPart(address, self._tags, self._layout.first * PAGE_BYTES)

    # --- inside ----------------------------------------------------------------------------

    def _span(self, at: int, data: NDArray[np.uint8]) -> tuple[int, int]:
        first, rest = divmod(at, PAGE_BYTES)
        count, tail = divmod(data.nbytes, PAGE_BYTES)
        first -= self._layout.first
        if rest or tail or first < 0 or first + count > len(self._layout.slots):
            raise ValueError(f"{data.nbytes} bytes at {at} are no whole pages of the extent")
        return first, count

    def _epochs_of(self, first: int, count: int) -> Iterator[bytes]:
        return (self._epochs[slot] for slot in self._layout.slots[first : first + count].tolist())

    def _page_key(self, epoch: bytes) -> bytes:
        found = self._page_keys.get(epoch)
        if found is None:
            found = derived(self._key, epoch, b"hillinfer pages 1" + self._place.packed)
            self._page_keys[epoch] = found
        return found


# --- What the cipher costs on this machine ---

_PAGES = 1024


@dataclass(frozen=True)
class CipherRate:
    """How fast one thread of this machine seals and opens pages of 4 KiB.

    Parameters
    ----------
    seal, open
        Bytes per second.
    library
        What did it, and its version.
    """

    seal: float
    open: float
    library: str

    @classmethod
    def measured(cls, engine: PageEngine | None = None) -> CipherRate:
        """Measure it over 4 MiB, which takes some milliseconds.

        Parameters
        ----------
        engine
            What does it; what stores take where None.

        Raises
        ------
        SecrecyError
            Where the library is not installed.
        """
        pages = aligned_buffer(_PAGES * PAGE_BYTES)
        pages[:] = np.frombuffer(os.urandom(len(pages)), np.uint8)
        engine = engine or page_engine()
        place, layout = Place(bytes(16), 0, 0), PageLayout.of_one_slot(_PAGES)
        cipher = PageCipher.begun(os.urandom(KEY_BYTES), place, layout, engine)
        started = time.perf_counter()
        sealed = cipher.seal(0, pages)
        between = time.perf_counter()
        cipher.open(0, sealed)
        ended = time.perf_counter()
        return cls(
            len(pages) / (between - started),
            len(pages) / (ended - between),
            engine.name,
        )
