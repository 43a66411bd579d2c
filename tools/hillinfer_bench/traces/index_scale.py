# SPDX-License-Identifier: Apache-2.0
"""A large store's index: the product's own code, fed with copies of traces and no drive's bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ScratchPath
from hillinfer.store.extent import Header
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    KEY_BYTES,
    UNIT_BYTES,
    ExtentShape,
    Namespace,
    root_key,
)
from hillinfer.store.store import Store
from hillinfer_bench.traces.request_trace import (
    BLOCK_TOKENS,
    Request,
    RequestTrace,
    TraceError,
    block_cost,
)
from hillinfer_bench.traces.scale import copies
from hillinfer_bench.traces.table import aligned
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Extents of Llama-3.1-8B: 32 layers, keys and values of 8 heads of 128 numbers, shadows of 4 bits.
SPACE = Namespace.of({"bench": "llama-3.1-8b"}, 32, 2 * 8 * 128 * 2, 128 * 4096)
_BLOCK_GROUPS = BLOCK_TOKENS // GROUP_TOKENS
_CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
_LONG_CHUNKS = 98
_LOOKUPS, _ASKED = 200, 32
_MOST_IDLE = 100_000
# Rows of a chunk: itself, and its prefixes.
_CHUNK_ROWS = 1 + CHUNK_GROUPS


class NoDrive(DriveCalls):
    """A drive that takes everything behind a file's first unit and keeps nothing of it."""

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write what says whose file it is, and nothing else."""
        return len(data) if offset >= UNIT_BYTES else super().pwrite(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        """Wait for nothing."""


@dataclass(frozen=True)
class IndexRow:
    """What an index of some size cost.

    Parameters
    ----------
    chunks, rows
        That it held at the end: rows are those of chunks and of prefixes.
    byte_count
        Of its file.
    inserts_per_second
        Chunks that were begun, published and let go, since the row before, lookups aside.
    evicted
        Chunks that gave way meanwhile.
    median_milliseconds, p99_milliseconds
        Of looking prompts up, long ones that came last, of 100,000 tokens at most, and leasing
        what is found.
    open_seconds
        Opening the store, its index checked.
    """

    chunks: int
    rows: int
    byte_count: int
    inserts_per_second: float
    evicted: int
    median_milliseconds: float
    p99_milliseconds: float
    open_seconds: float

    @property
    def bytes_per_chunk(self) -> float:
        """Bytes of the index for a chunk."""
        return self.byte_count / max(1, self.chunks)


def index_rows(
    place: Path, trace: RequestTrace, chunks: int, advance: Callable[[int], None]
) -> list[IndexRow]:
    """Fill an index with copies of a trace, a row at each doubling; the last one evicts.

    Parameters
    ----------
    place
        Where the store is made, and removed.
    trace
        Is copied until its chunks are enough.
    chunks
        That the store has room for.
    advance
        Called with the chunks that were written.
    """
    shape = ExtentShape.of(SPACE)
    # A 1024th is the index' own.
    size = (chunks + 1) * shape.byte_count * 1025 // 1024 + (64 << 20)
    Store.create(place, size)
    needed = 1 + chunks * _CHUNK_BLOCKS // max(1, trace.distinct)
    requests = cycle(copies(trace, 2 * needed).requests)
    try:
        rows: list[IndexRow] = []
        feeder = _Feeder(place, advance)
        for held in [*_doublings(chunks), chunks + chunks // 10]:
            feeder.feed(requests, held)
            rows.append(feeder.row())
        return rows
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _doublings(most: int) -> Iterator[int]:
    """Yield sizes that double and end with the largest."""
    sizes = [most]
    while sizes[-1] > 2 * max(1024, most // 32):
        sizes.append(sizes[-1] // 2)
    yield from reversed(sizes)


class _Feeder:
    """Asks an index for requests' chunks and stores those that are missing, as a store does.

    Parameters
    ----------
    place
        Of the store.
    advance
        Called with the chunks that were written.
    """

    def __init__(self, place: Path, advance: Callable[[int], None]) -> None:
        self._place = place
        self._advance = advance
        self._written = self._evicted = 0
        self._since = 0, 0, 0.0
        self._seconds = 0.0
        self._longest: list[list[bytes]] = []

    def feed(self, requests: Iterator[Request], written: int) -> None:
        """Serve requests until so many chunks have been written in all."""
        self._since = self._written, self._evicted, self._seconds
        idle = 0
        with self._open() as (store, owner):
            while self._written < written:
                before = self._written
                self._serve(store, owner, next(requests))
                idle = 0 if self._written > before else idle + 1
                if idle > _MOST_IDLE:
                    raise TraceError("the trace has too few whole chunks to fill an index with")
                self._advance(self._written)
            self._evicted += store.counts.evicted_chunks

    @contextmanager
    def _open(self) -> Iterator[tuple[Store, int]]:
        """Open the store and enter it as one more process, which leases."""
        with Store(self._place, calls=NoDrive()) as store:
            token = ScratchPath.make_file(store.places.owners, DriveCalls())
            owner = store.index.add_owner(token.path.name, os.getpid(), 0.0)
            try:
                yield store, owner
            finally:
                store.index.remove_owner(owner)
                token.remove()

    def row(self) -> IndexRow:
        """Return what the index costs now."""
        opening = time.perf_counter()
        with Store(self._place, calls=NoDrive()):
            opening = time.perf_counter() - opening
        with self._open() as (store, owner):
            times = list(self._lookups(store, owner))
            held = int(store.statistics()["chunks"])
            ((prefixes,),) = store.database.rows("SELECT count(*) FROM prefix")
        written, evicted, seconds = self._since
        return IndexRow(
            held,
            held + prefixes,
            store.places.index.stat().st_size,
            (self._written - written) / max(1e-9, self._seconds - seconds),
            self._evicted - evicted,
            float(np.median(times)),
            float(np.quantile(times, 0.99)),
            opening,
        )

    def _serve(self, store: Store, owner: int, request: Request) -> None:
        keys = keys_of(request)
        long = keys[: _LONG_CHUNKS * CHUNK_GROUPS]
        if 2 * len(long) >= max(map(len, self._longest), default=1):
            self._longest = [*self._longest[1 - _ASKED :], long]
        found = store.index.lookup(keys, owner)
        store.room.touch([chunk for chunk, _ in found])
        began = time.perf_counter()
        numbers = [chunk.number for chunk, _ in found]
        for position in range(len(found), len(keys) // CHUNK_GROUPS):
            first = position * CHUNK_GROUPS
            own = keys[first : first + CHUNK_GROUPS]
            parent = keys[first - 1] if position else root_key(SPACE.digest)
            above = numbers[-1] if numbers else None
            chunk = store.room.begin(SPACE, position, above, parent, own[-1])
            if chunk is None:
                break
            cost = sum(block_cost(position * _CHUNK_BLOCKS + at) for at in range(_CHUNK_BLOCKS))
            header = Header(
                store.places.pool, SPACE.digest, parent, own[-1], store.room.generation(), position,
                CHUNK_GROUPS, SPACE.layers, SPACE.row_bytes, SPACE.shadow_bytes, cost,
            )  # fmt: skip
            store.room.publish([(chunk.number, header, own)])
            store.room.end_writing([chunk.number])
            numbers.append(chunk.number)
            self._written += 1
        self._seconds += time.perf_counter() - began
        store.index.release(owner, [chunk.number for chunk, _ in found])
        store.room.write_due()

    def _lookups(self, store: Store, owner: int) -> Iterator[float]:
        for number in range(_LOOKUPS if self._longest else 0):
            keys = self._longest[number % len(self._longest)]
            began = time.perf_counter()
            found = store.index.lookup(keys, owner)
            yield 1e3 * (time.perf_counter() - began)
            store.index.release(owner, [chunk.number for chunk, _ in found])


def keys_of(request: Request) -> list[bytes]:
    """Return the keys of a request's whole chunks, 16 for each, as even as hashes of tokens."""
    whole = min(request.tokens // BLOCK_TOKENS, len(request.blocks)) // _CHUNK_BLOCKS
    keys: list[bytes] = []
    for block in request.blocks[: whole * _CHUNK_BLOCKS]:
        for pair in range(_BLOCK_GROUPS // 2):
            two = hashlib.blake2b(b"%d %d" % (block, pair)).digest()
            keys += two[:KEY_BYTES], two[KEY_BYTES:]
    return keys


# --- What a larger one would cost ---


@dataclass(frozen=True)
class ReckonedIndex:
    """An index of a store of many bytes, reckoned from the largest that was made.

    Parameters
    ----------
    store_bytes, chunks, index_bytes
        Of Llama-3.1-8B's extents.
    lookup_hours
        Of one core, for 10 million requests of 100,000 tokens, at the median.
    insert_hours
        Of one core, writing all chunks once.
    """

    store_bytes: float
    chunks: int
    index_bytes: float
    lookup_hours: float
    insert_hours: float


_REQUESTS = 10_000_000


def reckoned_index(rows: Sequence[IndexRow], store_bytes: float = 1e15) -> ReckonedIndex:
    """Return what a store of so many bytes would need, at the rates of the largest index."""
    last = rows[-1]
    chunks = int(store_bytes / ExtentShape.of(SPACE).byte_count)
    return ReckonedIndex(
        store_bytes,
        chunks,
        chunks * last.bytes_per_chunk,
        _REQUESTS * last.median_milliseconds / 3.6e6,
        chunks / last.inserts_per_second / 3600,
    )


def index_text(rows: Sequence[IndexRow]) -> str:
    """Return the indexes as a Markdown table, and what is reckoned from the last as a line."""
    lines = [
        ("chunks", "rows", "bytes a chunk", "inserts/s", "evicted", "lookup, p99 ms", "open s")
    ]
    lines += [
        (
            f"{row.chunks}",
            f"{row.rows}",
            f"{row.bytes_per_chunk:.0f}",
            f"{row.inserts_per_second:.0f}",
            f"{row.evicted}",
            f"{row.median_milliseconds:.2f}, {row.p99_milliseconds:.2f}",
            f"{row.open_seconds:.2f}",
        )
        for row in rows
    ]
    one = reckoned_index(rows)
    told = (
        f"modelled from the last row: {one.store_bytes / 1e15:g} PB hold {one.chunks / 1e6:.1f} M "
        f"chunks of Llama-3.1-8B, {one.index_bytes / 1e9:.1f} GB of index; writing all once takes "
        f"{one.insert_hours:.1f} hours of one core, 10 M lookups {one.lookup_hours:.1f}"
    )
    return "\n".join([aligned(lines), "", told])
