# SPDX-License-Identifier: Apache-2.0
"""How fast a store gives rows back, beside what its drive gives to long reads in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import Reads
from hillinfer.drive.files import aligned_buffer, round_up
from hillinfer.secrecy.key_sources import KeySource
from hillinfer.secrecy.library import TAG_BYTES
from hillinfer.store.extent import UNIT_BYTES, ExtentShape
from hillinfer.store.keys import CHUNK_TOKENS, Namespace
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
    """

    shape: str
    tokens: int
    byte_count: int
    stream_seconds: list[float]
    drive_seconds: list[float]
    store_seconds: float
    extra_bytes: float

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
    _, row_bytes = SHAPES[name]
    space = Namespace.of({"bench": name}, layers, row_bytes, 0)
    shape = ExtentShape.of(space, 0 if key is None else TAG_BYTES)
    chunks = tokens // CHUNK_TOKENS
    Store.create(place, round_up(2 * chunks * shape.byte_count + (64 << 20), UNIT_BYTES), key=key)
    ids = prompt(1, tokens)
    with Store(place, key=key) as store:
        seconds = _put(store, space, ids)
        found = store.find(space, ids)
        assert found is not None, store.counts.last_failure
        with found:
            assert found.tokens == tokens
            say(f"{name}: {tokens} tokens of {layers} layers stored in {seconds:.1f} s")
            streamed, plain = [], []
            for _ in range(rounds):
                plain.append(_timed(lambda: _read_plainly(store, found)))
                streamed.append(_timed(lambda: _read_all(found)))
            size = found.byte_count
    return StreamRow(
        name, tokens, size, streamed, plain, seconds, chunks * shape.byte_count / size - 1
    )


def _put(store: Store, space: Namespace, ids: list[int]) -> float:
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


def _read_all(found: StoredPrefix) -> None:
    for _ in found.stream():
        pass


def _read_plainly(store: Store, found: StoredPrefix) -> None:
    """Read as many bytes of the first file as the prefix has, in reads of 1 MiB."""
    memory: NDArray[np.uint8] = aligned_buffer(_WINDOW_BYTES)
    file, left, at = store.files[0], found.byte_count, UNIT_BYTES
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
    """Looking prompts up.

    Parameters
    ----------
    tokens
        Of each prompt.
    milliseconds
        Of each lookup, headers and token numbers read and compared.
    """

    tokens: int
    milliseconds: list[float]

    @property
    def p99(self) -> float:
        """The time that one of a hundred takes longer than, in milliseconds."""
        return float(np.quantile(self.milliseconds, 0.99))


def measure_lookups(place: Path, tokens: int, rounds: int) -> LookupRow:
    """Store a prompt of a tiny model and look it up over and over."""
    space = Namespace.of({"bench": "lookup"}, 1, 64, 0)
    Store.create(place, 256 << 20)
    ids, times = prompt(1, tokens), []
    with Store(place) as store:
        _put(store, space, ids[: tokens // CHUNK_TOKENS * CHUNK_TOKENS])
        for _ in range(rounds):
            started = time.perf_counter()
            found = store.find(space, ids)
            times.append(1e3 * (time.perf_counter() - started))
            assert found is not None
            found.close()
    return LookupRow(tokens, times)
