# SPDX-License-Identifier: Apache-2.0
"""Extents of a store as other hosts read them: by the key of a prefix, in ranges of bytes.

No path comes into it: a name is 64 hexadecimal digits, and is looked up in the index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.store.database import State
from hillinfer.store.keys import KEY_BYTES, Namespace
from hillinfer.store.pool_files import Span
from hillinfer.store.store import Store

# Bytes of one answer.
MOST_RANGE_BYTES = 16 << 20
_KEY = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class RangeError(ValueError):
    """No range of an extent that is answered."""


@dataclass(frozen=True)
class ServedExtent:
    """An extent that a prefix ends in.

    Parameters
    ----------
    span
        Where it lies.
    pool
        Identity of its store, which its headers name.
    """

    span: Span
    pool: bytes


def key_of(name: str) -> bytes | None:
    """Return the key that a name in a path stands for; None where it is none."""
    return bytes.fromhex(name) if _KEY.fullmatch(name) else None


def range_of(header: str | None, byte_count: int) -> range:
    """Return the bytes that a `Range` header asks for.

    Raises
    ------
    RangeError
        Where there is none, or it is not one range within the extent and `MOST_RANGE_BYTES`.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None:
        raise RangeError("ask for one range, as Range: bytes=0-4095")
    first, last = int(found[1]), int(found[2])
    if not first <= last < byte_count:
        raise RangeError(f"the extent has {byte_count} bytes")
    if last + 1 - first > MOST_RANGE_BYTES:
        raise RangeError(f"ask for {MOST_RANGE_BYTES} bytes at most")
    return range(first, last + 1)


def pages_of(wanted: range) -> int:
    """Return the bytes of the pages that a range touches."""
    return round_up(wanted.stop, PAGE_BYTES) - wanted.start // PAGE_BYTES * PAGE_BYTES


class ServedExtents:
    """Reads extents of a store for other hosts; any thread may.

    Nothing is leased: an extent that is given to other rows meanwhile has wrong checksums for
    whoever asked, to whom that is a miss.

    Parameters
    ----------
    store
        Open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def namespace(self, digest: bytes) -> Namespace | None:
        """Return a namespace of the store; None where it has none, or does not know its facts."""
        rows = self._store.database.rows(
            "SELECT about, layers, row_bytes, shadow_bytes FROM namespace WHERE digest = ?",
            (digest,),
        )
        found = Namespace(*rows[0]) if rows else None
        # An index that was made anew knows digests alone, until somebody stores there again.
        return found if found is not None and found.digest == digest else None

    def extent(self, key: bytes) -> ServedExtent | None:
        """Return the extent that a prefix ends in; None where it is not stored."""
        if len(key) != KEY_BYTES:
            return None
        rows = self._store.database.rows(
            "SELECT c.drive, c.unit, c.units FROM prefix p JOIN chunk c ON c.id = p.chunk "
            f"WHERE p.hash = ? AND c.state = {State.READY:d}",
            (key,),
        )
        return ServedExtent(Span(*rows[0]), self._store.places.pool) if rows else None

    def read(self, extent: ServedExtent, wanted: range) -> bytes:
        """Return bytes of an extent; OSError where its drive fails."""
        size = pages_of(wanted)
        return self.read_into(extent, wanted, aligned_buffer(size)[:size]).tobytes()

    def read_into(
        self, extent: ServedExtent, wanted: range, memory: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Read the pages of a range, and return the range in them; OSError as from `read`.

        Parameters
        ----------
        extent, wanted
            Which bytes.
        memory
            uint8 (`pages_of(wanted)`,), page-aligned.
        """
        first = wanted.start // PAGE_BYTES * PAGE_BYTES
        self._store.files[extent.span.drive].read(memory, extent.span.offset + first)
        return memory[wanted.start - first : wanted.stop - first]
