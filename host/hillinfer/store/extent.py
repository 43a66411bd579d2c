# SPDX-License-Identifier: Apache-2.0
"""Where a stored chunk's bytes lie in its extent, and the sheet that says what they should be.

An extent is a run of a pool file that holds one chunk, 1,024 tokens of one namespace:

    header A | header B | body A | body B | shadow plane: a slot per layer
    | row plane: an object per layer

A sheet is a header, one page, and a body: the token numbers, and checksums of every group of every
layer. There are two, written in turn: one that was torn leaves the other.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.native.library import native_library
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    KEY_BYTES,
    STORE_VERSION,
    TOKEN_TYPE,
    Namespace,
    group_keys,
)
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Extents begin at multiples of this, where a rebuild looks for them.
UNIT_BYTES = 128 * 1024

# --- Where things lie ---


@dataclass(frozen=True)
class ExtentShape:
    """Offsets inside the extents of a namespace, all of them whole pages.

    Parameters
    ----------
    layers, row_bytes, shadow_bytes
        As in `Namespace`.
    """

    layers: int
    row_bytes: int
    shadow_bytes: int

    @classmethod
    def of(cls, namespace: Namespace) -> ExtentShape:
        """Return the shape of a namespace's extents."""
        return cls(namespace.layers, namespace.row_bytes, namespace.shadow_bytes)

    @cached_property
    def body_bytes(self) -> int:
        """Bytes of the body of one sheet."""
        sums = self.layers * (CHUNK_GROUPS + 1) * 4
        return round_up(CHUNK_TOKENS * TOKEN_TYPE.itemsize + sums, PAGE_BYTES)

    @property
    def sheets_bytes(self) -> int:
        """Bytes of both sheets, which every extent begins with."""
        return 2 * (PAGE_BYTES + self.body_bytes)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of rows in one layer."""
        return GROUP_TOKENS * self.row_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of a chunk's rows in one layer."""
        return CHUNK_TOKENS * self.row_bytes

    @cached_property
    def byte_count(self) -> int:
        """Bytes of an extent."""
        planes = self.layers * (self.shadow_bytes + self.object_bytes)
        return round_up(self.sheets_bytes + planes, UNIT_BYTES)

    @property
    def units(self) -> int:
        """How many units an extent takes."""
        return self.byte_count // UNIT_BYTES

    def body_at(self, slot: int) -> int:
        """Return where the body of one of the two sheets begins; its header is page `slot`."""
        return 2 * PAGE_BYTES + slot * self.body_bytes

    def shadow_at(self, layer: int) -> int:
        """Return where a layer's shadow begins."""
        return self.sheets_bytes + layer * self.shadow_bytes

    def rows_at(self, layer: int, group: int = 0) -> int:
        """Return where a layer's rows begin, from some group of the chunk on."""
        plane = self.sheets_bytes + self.layers * self.shadow_bytes
        return plane + layer * self.object_bytes + group * self.group_bytes


# --- What an extent holds ---

_MAGIC = b"HillKV\r\n"
_HEADER = struct.Struct("<8sI I 16s 32s 32s 32s Q I I I I I d I I")
_CRC = struct.Struct("<I")


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

    @property
    def shape(self) -> ExtentShape:
        """Shape of the extent."""
        return ExtentShape(self.layers, self.row_bytes, self.shadow_bytes)

    @property
    def is_full(self) -> bool:
        """Whether all groups are filled, so that a chunk may follow."""
        return self.groups == CHUNK_GROUPS


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
    hashed
        What `group_keys` is where somebody has hashed these token numbers already.
    """

    header: Header
    ids: NDArray[np.uint32]
    row_sums: NDArray[np.uint32]
    shadow_sums: NDArray[np.uint32]
    hashed: Sequence[bytes] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def empty(cls, header: Header) -> Sheet:
        """Return a sheet of no groups."""
        layers = header.layers
        return cls(
            replace(header, groups=0, key=header.parent, has_shadow=False),
            np.zeros(CHUNK_TOKENS, TOKEN_TYPE),
            np.zeros((layers, CHUNK_GROUPS), np.uint32),
            np.zeros(layers, np.uint32),
        )

    @cached_property
    def group_keys(self) -> list[bytes]:
        """The key of each prefix that ends with a filled group."""
        if self.hashed is not None:
            return list(self.hashed)
        filled = self.ids[: self.header.groups * GROUP_TOKENS]
        return group_keys(self.header.parent, filled)

    def row_salts(self, layer: int, first: int, stop: int) -> NDArray[np.uint32]:
        """Return what checksums of some groups' rows begin with, uint32."""
        return salts(self.group_keys[first:stop], layer)

    def shadow_salt(self, layer: int) -> NDArray[np.uint32]:
        """Return what the checksum of a layer's shadow begins with, uint32 (1,)."""
        return salts([self.header.key], -1 - layer)

    # --- bytes ------------------------------------------------------------------------------

    def packed(self) -> tuple[bytes, bytes]:
        """Return the bytes of its header and of its body, whole pages."""
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
            one.layers,
            one.row_bytes,
            one.shadow_bytes,
            one.cost,
            one.turn,
            checksum(body),
        )
        page = page.ljust(PAGE_BYTES - _CRC.size, b"\0")
        return page + _CRC.pack(checksum(page)), body


@dataclass(frozen=True)
class Expected:
    """What a sheet must say to be of a prompt: whose rows, behind which prefix, of which tokens.

    Parameters
    ----------
    namespace
        Digest of the namespace.
    parent
        Key of the prefix before the chunk.
    keys
        Of the prefixes that end with the chunk's groups, as many as are wanted.
    ids
        Token numbers of those groups, 4 bytes each, as `TOKEN_TYPE`.
    """

    namespace: bytes
    parent: bytes
    keys: Sequence[bytes]
    ids: bytes

    def keys_of(self, header: Header, ids: bytes) -> Sequence[bytes] | None:
        """Return the keys of a chunk's groups where its token numbers begin as these do.

        None where they are others, or more. Equal numbers behind an equal key have equal keys.
        """
        own = self.ids[: header.groups * GROUP_TOKENS * TOKEN_TYPE.itemsize]
        if (
            len(self.keys) < header.groups
            or header.parent != self.parent
            or not ids.startswith(own)
        ):
            return None
        return self.keys[: header.groups]

    def covered_by(self, sheet: Sheet) -> int:
        """Return how many groups a sheet covers: all that it has and that are wanted, or none.

        Token numbers are compared one by one, whatever the keys say.
        """
        header = sheet.header
        groups = min(header.groups, len(self.keys))
        size = groups * GROUP_TOKENS
        same = (
            header.namespace == self.namespace
            and header.parent == self.parent
            and sheet.ids[:size].tobytes() == self.ids[: size * TOKEN_TYPE.itemsize]
            and sheet.group_keys[:groups] == list(self.keys[:groups])
        )
        return groups if same else 0


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
    content, (crc,) = page[: PAGE_BYTES - _CRC.size], _CRC.unpack(page[-_CRC.size :])
    if checksum(content) != crc:
        return None
    _, version, has_shadow, *fields, body_crc = _HEADER.unpack_from(content)
    # In the order in which `Header` has them.
    header = Header(*[*fields, bool(has_shadow)])
    if version != STORE_VERSION or header.pool != pool or not 0 < header.groups <= CHUNK_GROUPS:
        return None
    return header, body_crc


def read_sheet(
    page: bytes, body: bytes, pool: bytes, expected: Expected | None = None
) -> Sheet | None:
    """Return the sheet that a header page and a body are; None where they are none that is whole.

    Its keys are those of its token numbers, or it is none; `expected` spares hashing these where
    they are just those of a prompt.
    """
    found = read_header(page, pool)
    if found is None:
        return None
    header, crc = found
    if len(body) != header.shape.body_bytes or checksum(body) != crc:
        return None
    ids = np.frombuffer(body, TOKEN_TYPE, CHUNK_TOKENS)
    sums = np.frombuffer(body, "<u4", header.layers * (CHUNK_GROUPS + 1), ids.nbytes)
    rows = sums[: header.layers * CHUNK_GROUPS].reshape(header.layers, CHUNK_GROUPS)
    hashed = None if expected is None else expected.keys_of(header, body)
    sheet = Sheet(header, ids, rows, sums[header.layers * CHUNK_GROUPS :], hashed)
    return sheet if sheet.group_keys[-1] == header.key else None


def read_sheets(
    data: bytes, shape: ExtentShape, pool: bytes, expected: Expected | None = None
) -> list[tuple[int, Sheet]]:
    """Return the whole sheets that an extent of some shape begins with, and the slot of each."""
    found = []
    for slot in range(2):
        page = data[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
        start = shape.body_at(slot)
        sheet = read_sheet(page, data[start : start + shape.body_bytes], pool, expected)
        if sheet is not None and sheet.header.shape == shape:
            found.append((slot, sheet))
    return found


class SheetCache:
    """Sheets that this process has read, so that finding them again takes no read of a drive.

    What lies at a place under a generation never changes: the index tells the generation of what
    it lets find, and whoever writes there takes a new one. Any thread may use it.

    Parameters
    ----------
    most_bytes
        That its sheets may take; those that were used longest ago go first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._sheets: OrderedDict[tuple[int, int, int], tuple[int, Sheet]] = OrderedDict()

    def get(self, drive: int, unit: int, generation: int) -> tuple[int, Sheet] | None:
        """Return the sheet of a generation at a place, and its slot; None where it is not kept."""
        key = drive, unit, generation
        with self._lock:
            found = self._sheets.get(key)
            if found is not None:
                self._sheets.move_to_end(key)
            return found

    def keep(self, drive: int, unit: int, slot: int, sheet: Sheet) -> None:
        """Keep a sheet that was just read from a place."""
        key = drive, unit, sheet.header.generation
        with self._lock:
            if key not in self._sheets:
                self._bytes += _memory_of(sheet)
                self._sheets[key] = slot, sheet
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._sheets.popitem(last=False)
                self._bytes -= _memory_of(gone)


def _memory_of(sheet: Sheet) -> int:
    # Its body, its keys and what Python takes for the rest.
    return sheet.header.shape.body_bytes + 3072


# --- Checksums ---


def checksum(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    memory = np.frombuffer(data, np.uint8).reshape(1, -1)
    return int(native_library().crc32c(memory, np.zeros(1, np.uint32))[0])


def salts(keys: list[bytes], layer: int) -> NDArray[np.uint32]:
    """Return what the checksums of groups with these keys begin with in a layer, uint32.

    So bytes of another chunk, of another layer or of an older writer, and zeros, are wrong ones.
    """
    tail = struct.pack("<i", layer)
    memory = np.frombuffer(b"".join(key + tail for key in keys), np.uint8)
    pieces = memory.reshape(-1, KEY_BYTES + len(tail))
    return native_library().crc32c(pieces, np.zeros(len(keys), np.uint32))


def group_sums(rows: NDArray[np.uint8], own_salts: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the checksums of groups of rows.

    Parameters
    ----------
    rows
        uint8 (groups * 64, row_bytes), contiguous.
    own_salts
        uint32, from `salts`, one per group.
    """
    return native_library().crc32c(rows.reshape(len(own_salts), -1), own_salts)
