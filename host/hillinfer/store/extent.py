# SPDX-License-Identifier: Apache-2.0
"""The format of an extent, a stored chunk on a drive, and of the sheet that describes it.

An extent is a run of a pool file that holds one chunk, 1,024 tokens of one namespace:

    header A | header B | body A | body B | shadow plane: a slot per layer
    | row plane: an object per layer | tag plane, in an encrypted store | extra room, in some

A sheet is a header, one page, and a body: the token numbers, and checksums of every group of every
layer. There are two, written in turn: one that was torn leaves the other. In an encrypted store
sheets are sealed as a whole, and every page of the shadow and row planes alone; the tags of those
pages lie in the tag plane (`secrecy/pages.py`). What lies in extra room has sums of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.secrecy.pages import EPOCH_BYTES, Pages, Place, PlainPages
from hillinfer.secrecy.store_keys import Envelope, OpenedSheet, Plain, Sealing, StoreKeys
from hillinfer.store.database import Chunk
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    STORE_VERSION,
    TOKEN_TYPE,
    Expected,
    ExtentShape,
    checksum,
    covered_groups,
    group_keys,
    salts,
)
from hillinfer.store.pool_files import PoolFile, place_of
from hillinfer.system.kept_memory import KeptValues
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Sheets that are read at once, and what those may take that are kept in memory.
SHEETS_AT_ONCE = 16
_SHEET_BYTES = 32 << 20

# --- What an extent holds ---

_MAGIC = b"HillKV\r\n"
# A page that begins so was never written to.
_NOTHING = bytes(len(_MAGIC))
_HEADER = struct.Struct("<8sI I 16s 32s 32s 32s Q I I I I I d I I")
_CRC = struct.Struct("<I")
# In front of a page's checksum; 0 on pages of versions that knew of no extra room.
_EXTRA = struct.Struct("<I")
_EXTRA_AT = PAGE_BYTES - _CRC.size - _EXTRA.size
# Behind what a header says: of each group's pages, and of the shadows'.
_EPOCHS_BYTES = (CHUNK_GROUPS + 1) * EPOCH_BYTES


@dataclass(frozen=True)
class Header:
    """What the first page of a sheet says.

    Parameters
    ----------
    pool
        Which store it belongs to, 16 random bytes.
    namespace
        Digest of the namespace.
    parent, key
        Keys of the prefixes before the chunk, and up to its last filled group.
    generation
        Goes up with each sheet that is written to the extent; the higher one counts.
    position
        Number of the chunk in its chain.
    groups
        How many are filled.
    layers, row_bytes, shadow_bytes
        Shape of the extent.
    cost
        Seconds that computing its rows took.
    turn
        Which turn of a conversation it comes from, 1 the first; 0 where that is not known.
    has_shadow
        Whether the shadow plane is filled.
    tag_bytes
        Of the extent's shape; the store says it, not the page.
    extra_bytes
        Of the extent's shape.
    """

    pool: bytes
    namespace: bytes
    parent: bytes
    key: bytes
    generation: int
    position: int
    groups: int
    layers: int
    row_bytes: int
    shadow_bytes: int
    cost: float = 0.0
    turn: int = 0
    has_shadow: bool = False
    tag_bytes: int = 0
    extra_bytes: int = 0

    @cached_property
    def shape(self) -> ExtentShape:
        """Shape of the extent."""
        sizes = self.layers, self.row_bytes, self.shadow_bytes
        return ExtentShape(*sizes, self.tag_bytes, self.extra_bytes)

    @property
    def is_full(self) -> bool:
        """Whether all groups are filled, so that a chunk may follow."""
        return self.groups == CHUNK_GROUPS


def rows_digest(key: bytes, row_sums: NDArray[np.uint32]) -> bytes:
    """Return SHA-256 of a full chunk's key and row checksums: what is made of its rows alone."""
    return hashlib.sha256(key + row_sums.astype("<u4").tobytes()).digest()


@dataclass(frozen=True)
class Sheet:
    """A header, token numbers and checksums.

    Parameters
    ----------
    header
        The header.
    ids
        uint32 (1024,), those of groups that are not filled are 0.
    row_sums
        uint32 (layers, 16), CRC-32C of each group's rows behind its salt.
    shadow_sums
        uint32 (layers,), likewise; 0 where there is no shadow.
    sealing
        How the chunk is kept.
    epochs
        Of its pages, 16 bytes for each group and for the shadows; none where they are plain.
    hashed
        What `group_keys` is where somebody has hashed these token numbers already.
    matched
        What it was compared with as it was read, and is; None where it was not.
    """

    header: Header
    ids: NDArray[np.uint32]
    row_sums: NDArray[np.uint32]
    shadow_sums: NDArray[np.uint32]
    sealing: Sealing = field(default_factory=Plain)
    epochs: bytes = b""
    hashed: list[bytes] | None = field(default=None, repr=False, compare=False)
    matched: Expected | None = field(default=None, repr=False, compare=False)

    @classmethod
    def empty(cls, header: Header, sealing: Sealing) -> Sheet:
        """Return a sheet of no groups."""
        layers = header.layers
        return cls(
            replace(header, groups=0, key=header.parent, has_shadow=False),
            np.zeros(CHUNK_TOKENS, TOKEN_TYPE),
            np.zeros((layers, CHUNK_GROUPS), np.uint32),
            np.zeros(layers, np.uint32),
            sealing,
        )

    @cached_property
    def group_keys(self) -> list[bytes]:
        """The key of each prefix that ends with a filled group."""
        if self.hashed is not None:
            return list(self.hashed)
        filled = self.ids[: self.header.groups * GROUP_TOKENS]
        return group_keys(self.header.parent, filled, self.sealing.hash_key)

    @cached_property
    def _id_bytes(self) -> bytes:
        return self.ids.tobytes()

    def covered_of(self, wanted: Expected) -> int:
        """Return how many groups of a prompt it covers: all that it has and are wanted, or none.

        Token numbers are compared one by one, whatever the keys say.
        """
        header = self.header
        if wanted is self.matched:
            return header.groups
        groups = min(header.groups, len(wanted.keys))
        size = groups * GROUP_TOKENS
        same = (
            header.namespace == wanted.namespace
            and header.parent == wanted.parent
            and self._id_bytes.startswith(wanted.ids[: size * TOKEN_TYPE.itemsize])
            and (self.hashed or self.group_keys)[:groups] == wanted.keys[:groups]
        )
        return groups if same else 0

    def row_salts(self, layer: int, first: int, stop: int) -> NDArray[np.uint32]:
        """Return what checksums of some groups' rows begin with, uint32."""
        return salts(self.group_keys[first:stop], layer)

    def shadow_salt(self, layer: int) -> NDArray[np.uint32]:
        """Return what the checksum of a layer's shadow begins with, uint32 (1,)."""
        return salts([self.header.key], -1 - layer)

    # --- bytes ------------------------------------------------------------------------------

    def packed(self) -> tuple[bytes, bytes]:
        """Return the bytes of its header and of its body, whole pages, before they are sealed."""
        one = self.header
        body = self.ids.astype(TOKEN_TYPE).tobytes()
        body += self.row_sums.astype("<u4").tobytes() + self.shadow_sums.astype("<u4").tobytes()
        body = body.ljust(one.shape.body_bytes, b"\0")
        page = _HEADER.pack(
            _MAGIC,
            STORE_VERSION,
            int(one.has_shadow),
            one.pool,
            one.namespace,
            one.parent,
            one.key,
            one.generation,
            one.position,
            one.groups,
            *(one.layers, one.row_bytes, one.shadow_bytes, one.cost, one.turn),
            checksum(body, len(body)),
        )
        page += self.epochs
        page = page.ljust(_EXTRA_AT, b"\0") + _EXTRA.pack(one.extra_bytes)
        return page + _CRC.pack(checksum(page, len(page))), body

    def sealed(self, place: Place, slot: int) -> tuple[bytes, bytes]:
        """Return the bytes of its header and of its body as they are written.

        Parameters
        ----------
        place, slot
            Of the extent, and which of its two sheets this is.
        """
        one = self.header
        sizes = one.layers, one.row_bytes, one.shadow_bytes
        return self.sealing.sealed_sheet(place, slot, sizes, *self.packed())

    def pages(self, place: Place) -> Pages:
        """Return what the pages of its extent go through."""
        if not self.sealing.tag_bytes:
            # A lookup waits for this: of plain pages nobody asks where they lie.
            return PlainPages()
        return self.sealing.pages(place, self.header.shape.page_layout, self.epochs)


def read_header(page: bytes, pool: bytes) -> tuple[Header, int] | None:
    """Return the header that a page holds, and the checksum of what follows it.

    None where there is none, or not one of this pool and version.

    Parameters
    ----------
    page
        The first page of a sheet.
    pool
        Identity of the store.
    """
    if len(page) < PAGE_BYTES or not page.startswith(_MAGIC):
        return None
    (crc,) = _CRC.unpack_from(page, PAGE_BYTES - _CRC.size)
    if checksum(page, PAGE_BYTES - _CRC.size) != crc:
        return None
    _, version, has_shadow, *fields, body_crc = _HEADER.unpack_from(page)
    # In the order in which `Header` has them.
    header = Header(*[*fields, bool(has_shadow), 0, _extra_of(page)])
    if version != STORE_VERSION or header.pool != pool or not 0 < header.groups <= CHUNK_GROUPS:
        return None
    return header, body_crc


def shape_of(page: bytes, pool: bytes, keys: StoreKeys) -> ExtentShape | None:
    """Return the shape of the extent that a header page belongs to, None where it is no header.

    Of an encrypted store's pages nothing more can be told without a key.
    """
    if keys.tag_bytes:
        envelope = Envelope.read(page, pool)
        return None if envelope is None else ExtentShape(*envelope.sizes, keys.tag_bytes)
    found = read_header(page, pool)
    return None if found is None else found[0].shape


def read_sheet(
    opened: OpenedSheet, pool: bytes, shape: ExtentShape, expected: Expected | None = None
) -> Sheet | None:
    """Return the sheet of an extent that a page and a body are; None where none that is whole.

    Its keys are those of its token numbers, or it is none; `expected` spares hashing these where
    they are just those of a prompt.
    """
    if (found := read_header(opened.page, pool)) is None:
        return None
    (header, crc), body, sealing = found, opened.body, opened.sealing
    header = replace(header, tag_bytes=sealing.tag_bytes) if sealing.tag_bytes else header
    # Number by number: a lookup waits for a shape that is made for every chunk.
    own = header.layers, header.row_bytes, header.shadow_bytes, header.tag_bytes
    if own != (shape.layers, shape.row_bytes, shape.shadow_bytes, shape.tag_bytes):
        return None
    if len(body) != shape.body_bytes or checksum(body, len(body)) != crc:
        return None
    epochs = opened.page[_HEADER.size :][: _EPOCHS_BYTES if sealing.tag_bytes else 0]
    hashed = None if expected is None else expected.keys_of(header.parent, header.groups, body)
    sheet = _sheet_of(header, body, sealing, epochs, hashed)
    return sheet if (hashed or sheet.group_keys)[-1] == header.key else None


def _sheet_of(
    header: Header,
    body: bytes,
    sealing: Sealing,
    epochs: bytes,
    hashed: list[bytes] | None,
    matched: Expected | None = None,
) -> Sheet:
    """Return the sheet of a header and a body that are known to be whole."""
    ids = np.frombuffer(body, TOKEN_TYPE, CHUNK_TOKENS)
    sums = np.frombuffer(body, "<u4", header.layers * (CHUNK_GROUPS + 1), ids.nbytes)
    rows = sums[: header.layers * CHUNK_GROUPS].reshape(header.layers, CHUNK_GROUPS)
    shadows = sums[header.layers * CHUNK_GROUPS :]
    return Sheet(header, ids, rows, shadows, sealing, epochs, hashed, matched)


def read_sheets(
    data: NDArray[np.uint8],
    shape: ExtentShape,
    place: Place,
    keys: StoreKeys,
    expected: Expected | None = None,
) -> list[tuple[int, Sheet]]:
    """Return the whole sheets that an extent of some shape begins with, and the slot of each.

    Parameters
    ----------
    data
        What the extent begins with, uint8.
    shape, place
        Of the extent.
    keys
        Open sheets that are sealed.
    expected
        As in `read_sheet`.

    Raises
    ------
    SecrecyError
        Where there is no key to try.
    """
    found, view = [], data.data
    for slot in range(2):
        page = view[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
        if page[: len(_NOTHING)] == _NOTHING:
            continue
        start = shape.body_at(slot)
        body = view[start : start + shape.body_bytes]
        opened = keys.opened(place, slot, bytes(page), bytes(body))
        sheet = None if opened is None else read_sheet(opened, place.pool, shape, expected)
        if sheet is not None:
            found.append((slot, sheet))
    return found


def plain_sheets(
    data: NDArray[np.uint8], shape: ExtentShape, pool: bytes, expected: Sequence[Expected]
) -> list[list[tuple[int, Sheet]]]:
    """Return those of plain extents that are of a prompt, as `read_sheets` does, all at once.

    Of an extent without any nothing is said: it may be another prompt's, or hold more than wanted.

    Parameters
    ----------
    data
        What extents of one shape begin with, uint8 (extents, sheets_bytes).
    shape, pool
        Theirs, and the store's identity.
    expected
        What each should be: chunks of one namespace.
    """
    if any(len(one.keys) < CHUNK_GROUPS for one in expected[:-1]):
        return [[] for _ in expected]
    covered = covered_groups(data, shape, pool, expected)
    found: list[list[tuple[int, Sheet]]] = []
    for view, own, groups in zip(data, expected, covered, strict=True):
        found.append([])
        for slot in (0, 1) if min(groups) >= 0 else ():
            if groups[slot]:
                start = shape.body_at(slot)
                _, _, has_shadow, *fields, _ = _HEADER.unpack_from(view, slot * PAGE_BYTES)
                body = view[start : start + shape.body_bytes].tobytes()
                extra = _extra_of(view.data, slot * PAGE_BYTES)
                header = Header(*[*fields, bool(has_shadow), 0, extra])
                sheet = _sheet_of(header, body, Plain(), b"", own.keys[: groups[slot]], own)
                found[-1].append((slot, sheet))
    return found


def _extra_of(page: bytes | memoryview, at: int = 0) -> int:
    return int(_EXTRA.unpack_from(page, at + _EXTRA_AT)[0])


def _memory_of(sheet: Sheet) -> int:
    # Its body, its token numbers once more, its keys and what Python takes for the rest.
    body = sheet.ids.nbytes + sheet.row_sums.nbytes + sheet.shadow_sums.nbytes
    return round_up(body, PAGE_BYTES) + sheet.ids.nbytes + 3072


class SheetReader:
    """Reads the sheets of chunks from their drives, each once as far as memory goes.

    Any thread may use it.

    Parameters
    ----------
    files
        The store's, by number of the drive.
    pool, keys
        Identity of the store, and what opens sheets that are sealed.
    shape
        Returns the shape of a namespace's extents, by its number.
    """

    def __init__(
        self,
        files: Sequence[PoolFile],
        pool: bytes,
        keys: StoreKeys,
        shape: Callable[[int], ExtentShape],
    ) -> None:
        self._files = files
        self._pool = pool
        self._keys = keys
        self._shape = shape
        # What lies at a place under a generation never changes: the index tells the generation of
        # what it lets find, and whoever writes there takes a new one.
        self._known: KeptValues[tuple[int, int, int], tuple[int, Sheet]] = KeptValues(_SHEET_BYTES)

    def of(
        self, chunks: Sequence[Chunk], expected: Sequence[Expected | None]
    ) -> list[list[tuple[int, Sheet]]]:
        """Return the whole sheets of each chunk, with their slots, in two.

        Parameters
        ----------
        chunks
            Of one namespace, leased.
        expected
            What each should be, None where nobody knows.

        Raises
        ------
        OSError
            Where a drive cannot be read.
        SecrecyError
            Where they are sealed and there is no key to try.
        """
        places = [(chunk.span.drive, chunk.span.unit, chunk.generation) for chunk in chunks]
        found = [[] if known is None else [known] for known in self._known.get(places)]
        missing = [at for at, sheets in enumerate(found) if not sheets]
        if not missing:
            return found
        shape = replace(self._shape(chunks[0].namespace), tag_bytes=self._keys.tag_bytes)
        size = shape.sheets_bytes
        memory = aligned_buffer(len(missing) * size)
        for drive, file in enumerate(self._files):
            rows = [row for row, at in enumerate(missing) if chunks[at].span.drive == drive]
            if rows:
                starts = np.array(rows, np.int64) * size
                offsets = np.array([chunks[missing[row]].span.offset for row in rows], np.int64)
                reads = Reads(offsets, starts, np.full(len(rows), size))
                file.read_many(reads, memory, SHEETS_AT_ONCE)
        parts = memory[: len(missing) * size].reshape(-1, size)
        wanted = [one for at in missing if (one := expected[at]) is not None]
        plain: list[list[tuple[int, Sheet]]] = [[] for _ in missing]
        if len(wanted) == len(missing) and not shape.tag_bytes:
            plain = plain_sheets(parts, shape, self._pool, wanted)
        for at, part, sheets in zip(missing, parts, plain, strict=True):
            given = place_of(chunks[at].span, self._pool), self._keys, expected[at]
            found[at] = sheets or read_sheets(part, shape, *given)
        self._known.keep(
            ((*places[at][:2], one[1].header.generation), one, _memory_of(one[1]))
            for at in missing
            for one in found[at]
        )
        return found

    def forget(self) -> None:
        """Keep none of the sheets any more that were read."""
        self._known.clear()
