# SPDX-License-Identifier: Apache-2.0
"""Codes of a chunk's values in the extra room of its extent: written, found whole, or not there.

Extra room begins with a page that names the rows that the codes were made of, and has a checksum of
each layer's codes. Behind it lies a slot per layer: statistics of values, then a code row and
exponents for each token. What is not just so costs time: the codes are made of the rows again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.store.extent import rows_digest
from hillinfer.store.keys import CHUNK_TOKENS, READS_IN_FLIGHT, checksum, group_sums
from hillinfer.store.pool_files import READ_BYTES
from hillinfer.store.prefix import StoredChunk
from hillinfer.store.store import Store
from hillinfer.store.writer import PrefixWriter
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes

_MAGIC = b"HillVal\n"
# Magic, digest of the rows, layers, bytes of a slot.
_PAGE = struct.Struct("<8s 32s I I")
_SUM_BYTES = 4
# The page with the sums says whose they are.
_NO_SALT = np.zeros(1, np.uint32)


class DamagedValuesError(Exception):
    """Codes of values cannot be read, or are not what was written."""


@dataclass(frozen=True)
class LayerValues:
    """Values of a chunk in one layer, coded.

    Parameters
    ----------
    codes
        uint8 (1024, a code row and its exponents).
    statistics
        By which they were made.
    """

    codes: NDArray[np.uint8]
    statistics: ChannelStatistics


class ValueSlots:
    """Where codes of values lie in extra room.

    Parameters
    ----------
    spec
        Fixes sizes.
    layers
        Of the model.

    Attributes
    ----------
    byte_count
        Of all of it, whole pages; 0 where the page of checksums has no room for so many layers.
    """

    def __init__(self, spec: KernelSpec, layers: int) -> None:
        self._heads = spec.kv_heads, spec.head_dim
        self._row_bytes = code_row_bytes(spec) + spec.kv_heads
        channels = spec.kv_heads * spec.head_dim
        self._codes = round_up(channels, 4) + 4 * channels
        self.layers = layers
        self.slot_bytes = round_up(self._codes + CHUNK_TOKENS * self._row_bytes, PAGE_BYTES)
        fits = _PAGE.size + (layers + 1) * _SUM_BYTES <= PAGE_BYTES
        self.byte_count = PAGE_BYTES + layers * self.slot_bytes if fits else 0

    def at(self, layer: int) -> int:
        """Return where a layer's slot begins."""
        return PAGE_BYTES + layer * self.slot_bytes

    def pack(self, values: LayerValues, out: NDArray[np.uint8]) -> None:
        """Fill uint8 (slot_bytes,)."""
        out[:] = 0
        means = values.statistics.means.astype("<i4").reshape(-1)
        exponents = values.statistics.exponents.reshape(-1)
        out[: len(exponents)] = exponents.view(np.uint8)
        out[self._codes - means.nbytes : self._codes] = means.view(np.uint8)
        out[self._codes : self._codes + values.codes.size] = values.codes.reshape(-1)

    def unpack(self, data: NDArray[np.uint8]) -> LayerValues:
        """Return what uint8 (slot_bytes,) holds; codes are a view."""
        channels = self._heads[0] * self._heads[1]
        exponents = data[:channels].view(np.int8).reshape(self._heads).copy()
        means = data[self._codes - 4 * channels : self._codes].view("<i4").astype(np.int32)
        codes = data[self._codes : self._codes + CHUNK_TOKENS * self._row_bytes]
        statistics = ChannelStatistics(exponents, means.reshape(self._heads))
        return LayerValues(codes.reshape(CHUNK_TOKENS, -1), statistics)

    def page(self, digest: bytes, sums: list[int]) -> NDArray[np.uint8]:
        """Return the first page: of rows with a digest, and checksums of all slots, or of none."""
        head = _PAGE.pack(_MAGIC, digest, len(sums), self.slot_bytes)
        head += struct.pack(f"<{len(sums)}I", *sums)
        head = head.ljust(PAGE_BYTES - _SUM_BYTES, b"\0")
        page = aligned_buffer(PAGE_BYTES)[:PAGE_BYTES]
        page[:] = np.frombuffer(head + struct.pack("<I", checksum(head, len(head))), np.uint8)
        return page

    def sums(self, page: NDArray[np.uint8], digest: bytes) -> list[int]:
        """Return the checksums that a page tells of rows with a digest; none where no codes are.

        Raises
        ------
        DamagedValuesError
            Where it is not the page that was written with those rows.
        """
        data = page.tobytes()
        (sum_of_all,) = struct.unpack_from("<I", data, PAGE_BYTES - _SUM_BYTES)
        magic, written_of, layers, size = _PAGE.unpack_from(data)
        is_whole = magic == _MAGIC and sum_of_all == checksum(data, PAGE_BYTES - _SUM_BYTES)
        if not is_whole or written_of != digest or size != self.slot_bytes:
            # Where an extent lay before may be a page of other rows, even of the same tokens.
            raise DamagedValuesError("their first page is not what was written")
        if layers not in (0, self.layers):
            raise DamagedValuesError(f"they are of {layers} layers and not of {self.layers}")
        return list(struct.unpack_from(f"<{layers}I", data, _PAGE.size))


def write_values(
    writer: PrefixWriter,
    position: int,
    slots: ValueSlots,
    values_of: Callable[[int], LayerValues | None],
) -> None:
    """Write codes of a chunk that is about to be published, or that not all layers have some.

    Parameters
    ----------
    writer, position
        Whose chunk, and its number; all of its rows are written.
    slots
        Where they lie.
    values_of
        Returns a layer's; None where it has none.
    """
    digest = writer.rows_digest(position)
    if digest is None:
        return
    memory = aligned_buffer(slots.slot_bytes)[: slots.slot_bytes]
    sums: list[int] = []
    for layer in range(slots.layers):
        values = values_of(layer)
        if values is None:
            sums.clear()
            break
        slots.pack(values, memory)
        sums.append(_sum_of(memory))
        writer.write_extra(position, slots.at(layer), memory)
    # Behind the others: a page says that all of them are there.
    writer.write_extra(position, 0, slots.page(digest, sums))


def stored_values(
    store: Store, chunk: StoredChunk, slots: ValueSlots, memory: NDArray[np.uint8]
) -> Iterator[LayerValues]:
    """Yield codes of a chunk's values layer by layer, each valid until the next; none if not there.

    Parameters
    ----------
    store, chunk
        Of a prefix that is leased.
    slots
        Where they lie.
    memory
        What they come to, uint8, aligned to pages; where it has no room for a layer's, memory of
        their own.

    Raises
    ------
    DamagedValuesError
        Where they cannot be read, or are not what was written; layers before are right.
    """
    shape, span = chunk.shape, chunk.record.span
    if not slots.byte_count or shape.extra_bytes != slots.byte_count:
        return
    file, start = store.files[span.drive], span.offset + shape.extra_at
    at_once = max(1, len(memory) // slots.slot_bytes)
    if len(memory) < slots.slot_bytes:
        memory = aligned_buffer(slots.slot_bytes)
    try:
        file.read(memory[:PAGE_BYTES], start)
        digest = rows_digest(chunk.sheet.header.key, chunk.sheet.row_sums)
        sums = slots.sums(memory[:PAGE_BYTES], digest)
        for first in range(0, len(sums), at_once):
            count = min(at_once, len(sums) - first)
            size = count * slots.slot_bytes
            reads = Reads.in_pieces(start + slots.at(first), size, READ_BYTES)
            file.read_many(reads, memory[:size], READS_IN_FLIGHT)
            for layer, own in enumerate(memory[:size].reshape(count, -1), first):
                if _sum_of(own) != sums[layer]:
                    raise DamagedValuesError(f"those of layer {layer} are not what was written")
                yield slots.unpack(own)
    except OSError as error:
        raise DamagedValuesError(f"they cannot be read: {error}") from error


def _sum_of(data: NDArray[np.uint8]) -> int:
    return int(group_sums(data, _NO_SALT)[0])
