# SPDX-License-Identifier: Apache-2.0
"""What a stored prefix is found by: hashes of its tokens, below a namespace of everything else.

A namespace also says how large its extents are, and so where the parts of each lie (`extent.py`).
What lies there is known by checksums.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.native.library import native_library
from hillinfer.native.signatures import SheetMatch
from hillinfer.secrecy.pages import PageLayout
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Of the files and of what is hashed.
STORE_VERSION = 1
# Tokens of a chunk: those of a shadow segment, which have their statistics in common.
CHUNK_TOKENS = 1024
CHUNK_GROUPS = CHUNK_TOKENS // GROUP_TOKENS
KEY_BYTES = 32
# Token numbers are hashed and stored as these.
TOKEN_TYPE = np.dtype("<u4")
# Reads in flight for one piece of rows.
READS_IN_FLIGHT = 4
# Objects of neighbouring layers are read together up to this many bytes of a chunk: more is no
# faster. Pieces that wait for a pass are so large that one call reads what lies together.
JOINED_BYTES, WAITING_BYTES = 4 << 20, 32 << 20
# So many times as many layers come with a waiting piece as with the one before it: those that a
# pass has keep it busy until then.
_GROWTH = 3
# Extents begin at multiples of this, where a rebuild looks for them.
UNIT_BYTES = 128 * 1024

# --- Everything that changes the bits of KV ---


@dataclass(frozen=True)
class Namespace:
    """Everything but tokens that decides which bits a row has; rows of two never meet.

    Parameters
    ----------
    about
        Canonical JSON of what the KV was made by: digest of weights, config, rotary settings,
        number types, adapter, kernel.
    layers, row_bytes
        Layers of the model, and bytes of a row of one of them, padding included.
    shadow_bytes
        Bytes of the key shadow of one chunk in one layer, statistics included, in whole pages; 0
        where none is stored.
    """

    about: str
    layers: int
    row_bytes: int
    shadow_bytes: int

    @classmethod
    def of(
        cls, facts: Mapping[str, object], layers: int, row_bytes: int, shadow_bytes: int
    ) -> Namespace:
        """Return the namespace of some facts, which JSON can say."""
        about = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
        return cls(about, layers, row_bytes, shadow_bytes)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all of it, 32 bytes."""
        shape = f"{STORE_VERSION},{self.layers},{self.row_bytes},{self.shadow_bytes}\n"
        return hashlib.sha256(shape.encode() + self.about.encode()).digest()


class Reuse(StrEnum):
    """Where a stored prefix may end."""

    LONGEST = "longest"
    """At any group of 64 tokens: as vLLM's, numbers may be rounded as in another division."""
    EXACT = "exact"
    """At a border of prefill chunks: the bits of a run that computes everything."""


# --- Where things lie in an extent ---


@dataclass(frozen=True)
class ExtentShape:
    """Offsets inside the extents of a namespace, all of them whole pages.

    Parameters
    ----------
    layers, row_bytes, shadow_bytes
        As in `Namespace`.
    tag_bytes
        That each page of the planes has in the tag plane; 0: there is none.
    extra_bytes
        Room behind all planes; each extent says of itself how much.
    """

    layers: int
    row_bytes: int
    shadow_bytes: int
    tag_bytes: int = 0
    extra_bytes: int = 0

    @classmethod
    def of(cls, namespace: Namespace, tag_bytes: int = 0, extra_bytes: int = 0) -> ExtentShape:
        """Return the shape of a namespace's extents; `tag_bytes` is that of their store."""
        sizes = namespace.layers, namespace.row_bytes, namespace.shadow_bytes
        return cls(*sizes, tag_bytes, extra_bytes)

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
        return round_up(self.extra_at + self.extra_bytes, UNIT_BYTES)

    @property
    def units(self) -> int:
        """How many units an extent takes."""
        return self.byte_count // UNIT_BYTES

    @property
    def tags_at(self) -> int:
        """Where the tag plane begins, behind the other planes."""
        return self.sheets_bytes + self.layers * (self.shadow_bytes + self.object_bytes)

    @property
    def extra_at(self) -> int:
        """Where the room behind the planes begins."""
        return self.tags_at + self.tag_plane_bytes

    @property
    def tag_plane_bytes(self) -> int:
        """Bytes of the tag plane, whole pages."""
        pages = (self.tags_at - self.sheets_bytes) // PAGE_BYTES
        return round_up(pages * self.tag_bytes, PAGE_BYTES)

    @cached_property
    def page_layout(self) -> PageLayout:
        """The pages of both planes: those of a group have an epoch in common, shadows the last."""
        shadows = np.full(self.layers * self.shadow_bytes // PAGE_BYTES, CHUNK_GROUPS, np.uint8)
        own = np.repeat(np.arange(CHUNK_GROUPS, dtype=np.uint8), self.group_bytes // PAGE_BYTES)
        slots = np.concatenate([shadows, np.tile(own, self.layers)])
        return PageLayout(self.sheets_bytes // PAGE_BYTES, slots, CHUNK_GROUPS + 1)

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


@dataclass(frozen=True)
class RowPiece:
    """Rows of neighbouring layers of some chunks, read at once into one buffer.

    Parameters
    ----------
    shape
        Of the chunks' extents.
    first, stop
        Layers.
    chunks
        Numbers of the chunks in their prefix.
    joined
        How many layers lie together in the buffer, chunk by chunk, and come in joined reads: all of
        them, or 1. With 1 the rows of a layer lie one behind the other, those of all chunks.
    threads
        Reads in flight.
    call_bytes
        What one call of a thread may read where neighbours of a file go to several places; 0 where
        each read is a call.
    """

    shape: ExtentShape
    first: int
    stop: int
    chunks: range
    joined: int
    threads: int
    call_bytes: int = 0

    @property
    def byte_count(self) -> int:
        """Bytes of the buffer that it takes."""
        return (self.stop - self.first) * len(self.chunks) * self.shape.object_bytes

    @property
    def runs(self) -> list[range]:
        """The chunks whose rows of a layer lie one behind the other, run by run."""
        return [self.chunks] if self.joined == 1 else [range(one, one + 1) for one in self.chunks]

    def start(self, layer: int, chunk: int) -> int:
        """Return where a chunk's rows of a layer begin in the buffer."""
        block, at = divmod(layer - self.first, self.joined)
        places = block * len(self.chunks) + chunk - self.chunks.start
        return (places * self.joined + at) * self.shape.object_bytes

    def reads(
        self, offsets: Sequence[int], groups: Sequence[int], wanted: Iterable[int], most_bytes: int
    ) -> Reads:
        """Return what brings it, chunk by chunk, as they lie in the file.

        Parameters
        ----------
        offsets, groups
            Of each chunk: where its extent begins in its file, and groups to be read.
        wanted
            Which chunks, by their place among them.
        most_bytes
            Of a read.
        """
        size = self.joined * self.shape.object_bytes
        reads: list[tuple[int, int, int]] = []
        for chunk in wanted:
            # The last layer's rows end with the last group that is wanted.
            own = size - self.shape.group_bytes * (CHUNK_GROUPS - groups[chunk])
            for block, layer in enumerate(range(self.first, self.stop, self.joined)):
                start = offsets[chunk] + self.shape.rows_at(layer)
                place = size * (block * len(self.chunks) + chunk)
                for at in range(0, own, most_bytes):
                    reads.append((start + at, place + at, min(most_bytes, own - at)))
        # A few numbers: numpy takes ten times as long to multiply them out.
        starts, places, counts = np.array(reads, np.int64).reshape(-1, 3).T
        return Reads(starts, places, counts)

    def read_rows(
        self, reads: Reads
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return of each read of whole groups the layer, the first token's position and its tokens.

        Each int64 (reads,); for a piece whose layers are not joined.
        """
        size = len(self.chunks) * self.shape.object_bytes
        layers, at = np.divmod(reads.buffer_offsets, size)
        first = self.chunks.start * CHUNK_TOKENS
        start, tokens = (one // self.shape.row_bytes for one in (at, reads.byte_counts))
        return layers + self.first, first + start, tokens


def pieces_of(shape: ExtentShape, first_layer: int, chunks: int) -> Iterator[RowPiece]:
    """Cut a part of a prefix into reads of neighbouring layers and chunks.

    The first layers are few at a time: whoever computes waits for them, and not for the others.
    """
    most = max(1, JOINED_BYTES // shape.object_bytes)
    layer, joined = first_layer, 1
    while layer < shape.layers:
        own = range(layer, min(layer + joined, shape.layers))
        for part in _parts(shape, own, chunks, JOINED_BYTES):
            yield RowPiece(shape, own.start, own.stop, part, len(own), READS_IN_FLIGHT)
        layer, joined = own.stop, min(2 * joined, most)


def waiting_pieces(
    shape: ExtentShape, first_layer: int, chunks: int, most_layers: int, reads: int
) -> Iterator[RowPiece]:
    """Cut it so that few come beside a pass; the first layer as soon as it can be there.

    Parameters
    ----------
    shape, first_layer, chunks
        As of `pieces_of`.
    most_layers
        Of a piece.
    reads
        In flight for a piece behind the first layer.
    """
    first = range(first_layer, min(first_layer + 1, shape.layers))
    for part in _parts(shape, first, chunks, JOINED_BYTES):
        yield RowPiece(shape, first.start, first.stop, part, 1, READS_IN_FLIGHT)
    most = max(1, min(most_layers, WAITING_BYTES // (chunks * shape.object_bytes)))
    layer, count = first.stop, min(_GROWTH, most)
    while layer < shape.layers:
        own = range(layer, min(layer + count, shape.layers))
        for part in _parts(shape, own, chunks, WAITING_BYTES):
            yield RowPiece(shape, own.start, own.stop, part, 1, reads, JOINED_BYTES)
        layer, count = own.stop, min(_GROWTH * count, most)


def _parts(shape: ExtentShape, layers: range, chunks: int, most_bytes: int) -> Iterator[range]:
    """Yield chunks whose rows of some layers are so many bytes at most, or one chunk."""
    own = max(1, most_bytes // max(1, len(layers) * shape.object_bytes))
    for start in range(0, chunks if layers else 0, own):
        yield range(start, min(start + own, chunks))


# --- Hashes of prefixes ---


def root_key(namespace: bytes, salt: bytes = b"", hash_key: bytes = b"") -> bytes:
    """Return the key of no tokens at all, which every chain begins with.

    Parameters
    ----------
    namespace
        Digest of a `Namespace`.
    salt
        Of one tenant; what another has stored is never found, not even by its timing.
    hash_key
        As in `group_keys`.
    """
    return _hashed(b"hillinfer store %d " % STORE_VERSION + namespace + salt, hash_key)


def token_words(ids: Sequence[int] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return token numbers as they are hashed and stored, uint32.

    Raises
    ------
    OverflowError
        Where one is negative or takes more than 32 bits.
    """
    if not isinstance(ids, np.ndarray):
        # Three times as fast as numpy is with a list, and a lookup waits for it.
        words = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
        ids = np.frombuffer(words, np.uint32)
    return np.ascontiguousarray(ids, TOKEN_TYPE)


def native_chain(before: bytes, groups: NDArray[np.uint8]) -> bytes | None:
    """Return the chain of SHA-256 over groups by the native library, if that can."""
    return native_library().prefix_keys(before, groups)


def group_keys(
    before: bytes,
    ids: Sequence[int] | NDArray[np.uint32],
    hash_key: bytes = b"",
    chain_of: Callable[[bytes, NDArray[np.uint8]], bytes | None] = native_chain,
) -> list[bytes]:
    """Return the key of each prefix that ends with a full group of 64 tokens.

    Each is SHA-256 of the key before it and the group's 64 token numbers.

    Parameters
    ----------
    before
        Key of what comes before the first of these tokens: `root_key`, or that of a group.
    ids
        Token numbers from there on; those behind the last full group do not matter.
    hash_key
        Of an encrypted store: each is HMAC-SHA-256 by it, and the index confirms no guess.
    chain_of
        Makes all of them at once, or returns None: then each is made here.
    """
    words = token_words(ids)
    groups = words[: len(words) // GROUP_TOKENS * GROUP_TOKENS].view(np.uint8)
    groups = groups.reshape(-1, GROUP_TOKENS * TOKEN_TYPE.itemsize)
    if not hash_key:
        # A lookup waits for thousands of these: a call of Python for each would be a third of it.
        chain = chain_of(before, groups)
        if chain is not None:
            return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]
    own = (group.tobytes() for group in groups)
    return list(accumulate(own, lambda key, one: _hashed(key + one, hash_key), initial=before))[1:]


# A tuple, because a lookup makes one for every chunk.
class Expected(NamedTuple):
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
    keys: list[bytes]
    ids: bytes

    def keys_of(self, parent: bytes, groups: int, ids: bytes) -> list[bytes] | None:
        """Return the keys of a chunk's groups where its token numbers begin as these do.

        None where they are others, or more. Equal numbers behind an equal key have equal keys.
        """
        own = self.ids[: groups * GROUP_TOKENS * TOKEN_TYPE.itemsize]
        if len(self.keys) < groups or parent != self.parent or not ids.startswith(own):
            return None
        return self.keys[:groups]


def covered_groups(
    data: NDArray[np.uint8], shape: ExtentShape, pool: bytes, expected: Sequence[Expected]
) -> list[list[int]]:
    """Return how many groups of a prompt both sheets of each plain extent cover, all at once.

    0 where one is not whole or not of the prompt, else all of its groups; below 0 where it has more
    than are wanted, whose keys nobody knows yet.

    Parameters
    ----------
    data
        What extents of one shape begin with, uint8 (extents, sheets_bytes), contiguous.
    shape, pool
        Theirs, and the store's identity.
    expected
        What each should be: chunks of one namespace, all of them full but the last.
    """
    wanted = np.array([len(one.keys) for one in expected], np.int32)
    covered = np.zeros((len(expected), 2), np.int32)
    match = SheetMatch(
        data.ctypes.data, len(data), data.shape[1], shape.body_bytes, pool + expected[0].namespace,
        b"".join([one.parent for one in expected]),
        b"".join([key for one in expected for key in one.keys]),
        b"".join([one.ids for one in expected]), wanted.ctypes.data, covered.ctypes.data,
        STORE_VERSION, shape.layers, shape.row_bytes, shape.shadow_bytes,
    )  # fmt: skip
    native_library().functions.hillinfer_match_sheets(ctypes.byref(match))
    found: list[list[int]] = covered.tolist()
    return found


def _hashed(data: bytes, hash_key: bytes) -> bytes:
    return hmac.digest(hash_key, data, "sha256") if hash_key else hashlib.sha256(data).digest()


# --- Checksums ---


def checksum(data: bytes, count: int) -> int:
    """Return the CRC-32C of the first so many of some bytes."""
    # Without numpy, and with Python's lock: either would take longer than these bytes do.
    both = (ctypes.c_uint32 * 2)()
    native_library().tables.hillinfer_crc32c(data, count, 1, both, ctypes.byref(both, 4))
    return both[1]


def salts(keys: list[bytes], *layers: int) -> NDArray[np.uint32]:
    """Return what the checksums of groups with these keys begin with, layer by layer, uint32.

    So bytes of another chunk, of another layer or of an older writer, and zeros, are wrong ones.
    """
    tails = [struct.pack("<i", layer) for layer in layers]
    memory = np.frombuffer(b"".join(key + tail for tail in tails for key in keys), np.uint8)
    pieces = memory.reshape(-1, KEY_BYTES + len(tails[0]))
    return native_library().crc32c(pieces, np.zeros(len(pieces), np.uint32))


def group_sums(rows: NDArray[np.uint8], own_salts: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the checksums of groups of rows, contiguous uint8 (groups * 64, row_bytes).

    `own_salts` are uint32, from `salts`, one for each group.
    """
    return native_library().crc32c(rows.reshape(len(own_salts), -1), own_salts)
