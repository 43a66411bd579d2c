# SPDX-License-Identifier: Apache-2.0
"""How fast a drive's file comes into a card's memory, by the size of reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hillinfer.devices.errors import DeviceError
from hillinfer.devices.xrt.worker_process import WorkerProcess
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_file import ColdFile

BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Small reads are slow, and a few of them tell as much.
_READS = 256
_LARGEST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class CurvePoint:
    """Reads of one size.

    Parameters
    ----------
    block_bytes
        Bytes per read.
    bytes_per_second
        With a few reads at once, as launches have them.
    """

    block_bytes: int
    bytes_per_second: float


def read_curve(worker: WorkerProcess, file: ColdFile, seconds: float) -> Iterator[CurvePoint]:
    """Yield a point per size of reads, after a look at whether the bytes arrive.

    Parameters
    ----------
    worker
        With an opened card, and a window of at least 1 MiB.
    file
        An empty one; it is written first.
    seconds
        In which each answer of the worker must come.

    Raises
    ------
    DeviceError
        Where the card has no memory for it, fails, or holds other bytes than the file.
    ColdPoolError
        Where the drive fails.
    """
    answer = worker.ask("chunk", seconds, size=_LARGEST_BYTES)
    if "full" in answer:
        raise DeviceError(f"the card gives no memory that a drive can reach: {answer['full']}")
    # Drives may be faster with zeros.
    piece = aligned_buffer(_PIECE_BYTES)
    piece[:] = np.random.default_rng(0).integers(0, 256, piece.nbytes, np.uint8)
    for number in range(_LARGEST_BYTES // piece.nbytes):
        # Each piece is another, so that one in the place of another shows.
        piece[0] = number
        file.write(piece.data, number * piece.nbytes)
    _load(worker, file, seconds, _LARGEST_BYTES, _PIECE_BYTES)
    # Reading a card's memory over the bus is slow, so only the last piece is looked at.
    start = _LARGEST_BYTES - piece.nbytes
    worker.ask("read", seconds, chunk=0, offset=start, at=0, size=piece.nbytes)
    if not np.array_equal(worker.window[: piece.nbytes], piece):
        raise DeviceError("the card's memory does not hold what was read from the drive")
    for block in BLOCKS:
        size = min(_LARGEST_BYTES, block * _READS)
        began = time.perf_counter()
        _load(worker, file, seconds, size, block)
        yield CurvePoint(block, size / (time.perf_counter() - began))


def _load(worker: WorkerProcess, file: ColdFile, seconds: float, size: int, block: int) -> None:
    worker.ask(
        "load", seconds, [file.descriptor],
        parts=[[0, 0, 0, 0]], size=size, block=block,
    )  # fmt: skip
