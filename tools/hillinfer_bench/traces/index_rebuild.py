# SPDX-License-Identifier: Apache-2.0
"""Making a large store's index anew: real headers at their places in a file, and no rows."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hillinfer.store.extent import Header, Sheet
from hillinfer.store.keys import (
    CHUNK_GROUPS,
    CHUNK_TOKENS,
    TOKEN_TYPE,
    UNIT_BYTES,
    ExtentShape,
    group_keys,
    root_key,
)
from hillinfer.store.store import Store
from hillinfer_bench.traces.index_scale import SPACE

# Chunks of a prompt.
_CHAIN = 8


@dataclass(frozen=True)
class RebuildRow:
    """One index that was made anew.

    Parameters
    ----------
    chunks
        That the drive holds.
    spanned_bytes
        From the first extent to the last one's end; only sheets take room of it.
    seconds
        Opening the store without its index.
    """

    chunks: int
    spanned_bytes: int
    seconds: float

    @property
    def seconds_per_terabyte(self) -> float:
        """For extents of this size."""
        return self.seconds * 1e12 / self.spanned_bytes


def measure_rebuild(place: Path, chunks: int) -> RebuildRow:
    """Write the sheets of chunks of Llama-3.1-8B and open the store without an index.

    The file has holes where rows would be, so its sheets lie closer on the drive than they would.

    Parameters
    ----------
    place
        Where the store is made, and removed.
    chunks
        How many.
    """
    shape = ExtentShape.of(SPACE)
    spanned = chunks * shape.byte_count
    Store.create(place, spanned * 1025 // 1024 + (64 << 20))
    try:
        with Store(place) as store:
            file, pool = store.files[0].path, store.places.pool
        _write_sheets(file, pool, shape, chunks)
        store.places.index.unlink()
        began = time.perf_counter()
        with Store(place) as store:
            seconds = time.perf_counter() - began
            found = int(store.statistics()["chunks"])
        assert found == chunks, f"{found} chunks of {chunks} were found"
        return RebuildRow(chunks, spanned, seconds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_sheets(file: Path, pool: bytes, shape: ExtentShape, chunks: int) -> None:
    numbers = np.random.default_rng(1)
    root, generation = root_key(SPACE.digest), 0
    key = root
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.ftruncate(descriptor, UNIT_BYTES + chunks * shape.byte_count)
        for number in range(chunks):
            position, generation = number % _CHAIN, generation + 1
            parent = key if position else root
            ids = numbers.integers(0, 49152, CHUNK_TOKENS).astype(TOKEN_TYPE)
            key = group_keys(parent, ids)[-1]
            header = Header(
                pool, SPACE.digest, parent, key, generation, position, CHUNK_GROUPS,
                SPACE.layers, SPACE.row_bytes, SPACE.shadow_bytes,
            )  # fmt: skip
            sheet = Sheet(
                header,
                ids,
                np.zeros((SPACE.layers, CHUNK_GROUPS), np.uint32),
                np.zeros(SPACE.layers, np.uint32),
            )
            page, body = sheet.packed()
            offset = UNIT_BYTES + number * shape.byte_count
            os.pwrite(descriptor, page, offset)
            os.pwrite(descriptor, body, offset + shape.body_at(0))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rebuild_text(row: RebuildRow) -> str:
    """Return a line for reading."""
    return (
        f"an index of {row.chunks} chunks made anew from headers in {row.seconds:.2f} s; modelled: "
        f"{row.seconds_per_terabyte:.2f} s for a terabyte of these extents"
    )
