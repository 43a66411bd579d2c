# SPDX-License-Identifier: Apache-2.0
"""Rows landed by the native library and by its twin, and the reads that either makes."""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from twins.python_reads import ThreadEngine

from hillinfer.drive.checksums import sums_of
from hillinfer.drive.engine_table import UringEngine
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer
from hillinfer.drive.landing import FileRows, Landed
from hillinfer.drive.read_engines import NativeThreadEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from single_reads import SingleReads

CONTENT_BYTES = 3 << 20
FILL = 0xA5


class SeenReads(SingleReads):
    """Notes the file offset, the address and the bytes of every read, whoever makes it."""

    def __init__(self):
        self.reads = []
        self._noting = threading.Lock()

    def preadv(self, descriptor, into, offset):
        self._note(into, offset)
        return super().preadv(descriptor, into, offset)

    def read_done(self, descriptor, into, offset, result):
        self._note(into, offset)
        return super().read_done(descriptor, into, offset, result)

    def _note(self, into, offset):
        address = np.frombuffer(into, np.uint8).ctypes.data
        with self._noting:
            self.reads.append((offset, address, len(into)))


# By whom rows may be landed. One read at a time, so that the order is the plan's.
WAYS = {
    "threads": lambda calls: NativeThreadEngine(1, calls),
    "ring": lambda calls: UringEngine(1, calls),
    "twin": lambda calls: ThreadEngine(1),
}


@dataclass(frozen=True)
class Outcome:
    """What landing came to: reads as offset in the file, place in memory and bytes."""

    reads: list[tuple[int, int, int]]
    out: np.ndarray
    landed: Landed


def random_content():
    """Return the bytes of a file, whole pages, of which no two rows are alike."""
    data = aligned_buffer(CONTENT_BYTES)
    data[:] = np.random.default_rng(5).integers(0, 256, len(data), np.uint8)
    return data


def rows_of(content, row_bytes):
    """Return the whole rows of a content."""
    return content[: len(content) // row_bytes * row_bytes].reshape(-1, row_bytes)


class SeenFile(ColdFile):
    """A cold file with the calls that see its reads; pages and bytes where it is sealed."""

    def __init__(self, directory, mode, calls, pages=None, sealed=None):
        super().__init__(directory, mode, "rows of layer 4", calls)
        self.seen, self.pages, self.bytes = calls, pages, sealed


def file_of(directory, mode, content, calls=None, pages=None):
    """Return a cold file with a content, sealed where it has pages."""
    file = SeenFile(directory, mode, calls, pages, None if pages is None else content)
    file.write(content.data, 0)
    return file


def land(way, file, wanted, calls):
    """Land rows one way and return what came of it."""
    engine = WAYS[way](calls)
    calls.reads.clear()
    try:
        landed = engine.land(file, wanted)
    finally:
        engine.close()
    start = (wanted.out if wanted.lie_in_pages else wanted.buffer).ctypes.data
    # A ring brings reads in any order.
    reads = [(offset, address - start, count) for offset, address, count in calls.reads]
    return Outcome(reads, wanted.out, landed)


def wanted_rows(rows, row_bytes, buffer_bytes, sums=None, seed=0):
    """Return rows that go to random places of fresh memory with room for some more."""
    count = len(rows) + 3
    out = aligned_buffer(count * row_bytes)[: count * row_bytes].reshape(count, row_bytes)
    out[:] = FILL
    places = np.random.default_rng(seed).permutation(count)[: len(rows)]
    numbers = np.asarray(rows, np.int64)
    # Reads that overrun the buffer are seen behind it.
    memory = aligned_buffer(buffer_bytes + 8 * PAGE_BYTES)
    return FileRows(numbers, out, places.astype(np.int64), memory[:buffer_bytes], sums)


def sums_of_file(content, row_bytes):
    """Return the checksum of each row of a content."""
    rows = rows_of(content, row_bytes)
    return sums_of(np.ascontiguousarray(rows), np.arange(len(rows)))
