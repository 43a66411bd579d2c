# SPDX-License-Identifier: Apache-2.0
"""How fast a store gives rows back, beside what its drive gives to long reads in the same run."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.files import aligned_buffer, round_up
from hillinfer.secrecy.key_sources import KeySource
from hillinfer.secrecy.library import TAG_BYTES
from hillinfer.store.extent import SHEETS_AT_ONCE
from hillinfer.store.keys import (
    CHUNK_TOKENS,
    UNIT_BYTES,
    ExtentShape,
    Namespace,
    group_keys,
    root_key,
)
from hillinfer.store.pool_files import READ_BYTES
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import prompt
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Layers and bytes of a row, keys and values of 16 bits.
SHAPES = {
    "smollm2-135m": (30, 2 * 3 * 64 * 2),
    "llama-3.1-8b": (32, 2 * 8 * 128 * 2),
    "opt-6.7b": (32, 2 * 32 * 128 * 2),
}
_WINDOW_BYTES = 32 << 20
_THREADS = 4


class CountedWrites(DriveCalls):
    """Counts the bytes that are written.

    Attributes
    ----------
    byte_count
        So far.
    """

    def __init__(self) -> None:
        self.byte_count = 0

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write, as a `DriveCalls` does."""
        done = super().pwrite(descriptor, data, offset)
        self.byte_count += done
        return done


def index_bytes(place: Path) -> int:
    """Return the bytes of a store's index and its log: what it has written, and a little more."""
    return sum(file.stat().st_size for file in place.glob("index.sqlite*"))


@dataclass(frozen=True)
class StreamRow:
    """Reading one stored prefix, and the same bytes of the same file plainly.

    Parameters
    ----------
    shape, tokens, byte_count
        What was read, of rows.
    stream_seconds
        Of each round: rows through `StoredPrefix.stream`, compared with their checksums.
    drive_seconds
        Of each round, in turn with those: as many bytes of the same file in reads of 1 MiB, as many
        in flight, into the same kind of memory, and nothing else.
    store_seconds
        Writing and publishing them, rows made before.
    extra_bytes
        What the extents take beyond rows, of all bytes.
    extra_written
        What storing wrote beyond rows, of all bytes: sheets, the index and its log.
    """

    shape: str
    tokens: int
    byte_count: int
    stream_seconds: list[float]
    drive_seconds: list[float]
    store_seconds: float
    extra_bytes: float
    extra_written: float

    @property
    def share_of_drive(self) -> float:
        """Rate of the stream over that of the plain reads, medians."""
        return statistics.median(self.drive_seconds) / statistics.median(self.stream_seconds)

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of the stream, median."""
        return self.byte_count / statistics.median(self.stream_seconds) / 1e9


def measure_stream(
    place: Path,
    name: str,
    tokens: int,
    layers: int,
    rounds: int,
    say: Callable[[str], None],
    key: KeySource | None = None,
) -> StreamRow:
    """Store a prompt of some shape, and read it back in turn with plain reads.

    Parameters
    ----------
    place
        Where the store is made.
    name
        Of a shape.
    tokens
        A multiple of 1,024.
    layers
        How many of its layers, where the whole would not fit the drive.
    rounds
        How often.
    say
        Takes a line of progress.
    key
        Of an encrypted store; None for a plain one.
    """
    chunks = tokens // CHUNK_TOKENS
    ids = prompt(1, tokens)
    space = make_store(place, name, layers, chunks, key)
    shape = ExtentShape.of(space, 0 if key is None else TAG_BYTES)
    calls = CountedWrites()
    with Store(place, calls=calls, key=key) as store:
        before = calls.byte_count + index_bytes(place)
        seconds = put_rows(store, space, ids)
        written = calls.byte_count + index_bytes(place) - before
        found = store.find(space, ids)
        assert found is not None, store.counts.last_failure
        with found:
            assert found.tokens == tokens
            say(f"{name}: {tokens} tokens of {layers} layers stored in {seconds:.1f} s")
            streamed, plain = [], []
            for _ in range(rounds):
                plain.append(_timed(lambda: read_plainly(store, found)))
                streamed.append(_timed(lambda: read_all(found)))
            size = found.byte_count
    return StreamRow(
        name,
        tokens,
        size,
        streamed,
        plain,
        seconds,
        chunks * shape.byte_count / size - 1,
        written / size - 1,
    )


def make_store(
    place: Path, name: str, layers: int, chunks: int, key: KeySource | None = None
) -> Namespace:
    """Make a store with room for so many chunks of some shape; return their namespace."""
    _, row_bytes = SHAPES[name]
    space = Namespace.of({"bench": name}, layers, row_bytes, 0)
    shape = ExtentShape.of(space, 0 if key is None else TAG_BYTES)
    size = 2 * chunks * shape.byte_count + (64 << 20)
    Store.create(place, round_up(size, UNIT_BYTES), key=key)
    return space


def make_stored(place: Path, name: str, layers: int, prompts: list[list[int]]) -> Namespace:
    """Make a store that holds prompts of some shape; return their namespace."""
    chunks = sum(len(ids) // CHUNK_TOKENS for ids in prompts)
    space = make_store(place, name, layers, chunks)
    with Store(place) as store:
        for ids in prompts:
            put_rows(store, space, ids)
    return space


def put_rows(store: Store, space: Namespace, ids: list[int]) -> float:
    """Store a prompt of whole chunks with rows that were made before; return the seconds."""
    size = CHUNK_TOKENS * space.row_bytes
    rows = aligned_buffer(size)[:size].reshape(CHUNK_TOKENS, -1)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    started = time.perf_counter()
    writer = store.writer(space, ids)
    assert writer is not None
    for start in range(0, len(ids), CHUNK_TOKENS):
        for layer in range(space.layers):
            writer.write(layer, start // GROUP_TOKENS, rows)
        writer.publish(start + CHUNK_TOKENS)
    writer.close()
    return time.perf_counter() - started


def read_all(found: StoredPrefix) -> None:
    """Read all rows of a prefix and compare them with their checksums."""
    for _ in found.stream():
        pass


def read_plainly(store: Store, found: StoredPrefix) -> None:
    """Read as many bytes of the first file as a prefix has, from where it begins, by 1 MiB."""
    memory: NDArray[np.uint8] = aligned_buffer(_WINDOW_BYTES)
    file, left, at = store.files[0], found.byte_count, found.chunks[0].record.span.offset
    while left:
        size = min(left, _WINDOW_BYTES)
        file.read_many(_pieces(at, size), memory, _THREADS)
        left, at = left - size, at + size


def _pieces(offset: int, size: int) -> Reads:
    return Reads.in_pieces(offset, size, READ_BYTES)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class LookupRow:
    """Looking a long prompt up, in three ways that a request may meet.

    Parameters
    ----------
    tokens
        Of the prompt, all of them stored.
    index_milliseconds
        Of each round: hashing the tokens, searching the index and leasing.
    first_milliseconds
        Of each round, by a store that was just opened: that, reading all headers, token numbers
        and checksums from the drive, and comparing every token.
    again_milliseconds
        Of each round, by a store that has read those sheets before: that, and comparing every
        token with them.
    sheet_milliseconds
        Of each round, in turn with the first ones: reading the same headers, token numbers and
        checksums, as many in flight, and nothing else.
    steady_milliseconds
        Of each round, hashing all tokens four times: the same instructions every time, as many as
        a lookup has, so that what differs is what the machine does beside.
    """

    tokens: int
    index_milliseconds: list[float]
    first_milliseconds: list[float]
    again_milliseconds: list[float]
    sheet_milliseconds: list[float]
    steady_milliseconds: list[float]

    @property
    def possible_p99(self) -> float:
        """The p99 that the fastest lookup would have if only others held it up, milliseconds."""
        steady = self.steady_milliseconds
        return min(self.again_milliseconds) * self.p99(steady) / min(steady)

    @property
    def possible_first_p99(self) -> float:
        """The p99 of a first lookup that reads its sheets and then takes as long as any other."""
        return statistics.median(self.again_milliseconds) + self.p99(self.sheet_milliseconds)

    @staticmethod
    def p99(milliseconds: list[float]) -> float:
        """Return the time that one of a hundred takes longer than, in milliseconds."""
        return float(np.quantile(milliseconds, 0.99))


# Hashing a prompt takes a quarter of finding it.
_STEADY_TIMES = 4


def measure_lookups(place: Path, tokens: int, rounds: int) -> LookupRow:
    """Store a prompt of a tiny model and look it up over and over."""
    space = Namespace.of({"bench": "lookup"}, 1, 64, 0)
    Store.create(place, 256 << 20)
    whole = tokens // CHUNK_TOKENS * CHUNK_TOKENS
    # As a cache hands them on, which takes them from the tensor that the model is given.
    ids = array("I", prompt(1, tokens))
    index, first, again, sheets, steady = [], [], [], [], []

    def look(store: Store) -> float:
        started = time.perf_counter()
        found = store.find(space, ids)
        spent = 1e3 * (time.perf_counter() - started)
        assert found is not None, store.counts.last_failure
        assert found.tokens == whole
        found.close()
        return spent

    with Store(place) as store:
        put_rows(store, space, ids[:whole].tolist())
        held = store.find(space, ids)
        assert held is not None, store.counts.last_failure
        with held:
            sheet_bytes = held.shape.sheets_bytes
            offsets = np.array([one.record.span.offset for one in held.chunks])
    places = sheet_bytes * np.arange(len(offsets))
    reads = Reads(offsets, places, np.full(len(offsets), sheet_bytes))
    for _ in range(rounds):
        with Store(place) as store:
            first.append(look(store))
            started = time.perf_counter()
            memory = aligned_buffer(len(offsets) * sheet_bytes)
            store.files[0].read_many(reads, memory, SHEETS_AT_ONCE)
            sheets.append(1e3 * (time.perf_counter() - started))
    with Store(place) as store:
        look(store)
        owner = store.index.owners().popitem()[1]
        for _ in range(10 * rounds):
            again.append(look(store))
            started = time.perf_counter()
            keys = group_keys(root_key(space.digest), ids)
            found = store.index.lookup(keys, owner)
            index.append(1e3 * (time.perf_counter() - started))
            store.index.release(owner, [chunk.number for chunk, _ in found])
            started = time.perf_counter()
            for _ in range(_STEADY_TIMES):
                group_keys(root_key(space.digest), ids)
            steady.append(1e3 * (time.perf_counter() - started))
    return LookupRow(tokens, index, first, again, sheets, steady)
