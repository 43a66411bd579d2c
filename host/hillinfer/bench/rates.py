# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads its memory and its drive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hillinfer.native.library import native_is_here, native_library
from hillinfer.settings import Settings
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_file import ColdFile, probe_io_mode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_engines import open_engine
from hillinfer.storage.reads import Reads

_READ_BYTES = 1 << 20
_BATCH = 32


@dataclass(frozen=True)
class MachineRates:
    """Bytes per second, measured before the first case.

    Parameters
    ----------
    memory
        Reading memory once, with all compute threads.
    drive
        Random reads of 1 MiB past the page cache, with the product's own read engine.
    """

    memory: float
    drive: float

    @classmethod
    def measure(
        cls, cold_dir: Path, memory_bytes: int = 256 << 20, drive_bytes: int = 512 << 20
    ) -> MachineRates:
        """Measure both; writes a file of `drive_bytes` on the drive for the time of it."""
        return cls(_memory_rate(memory_bytes), _drive_rate(cold_dir, drive_bytes))


def _memory_rate(byte_count: int) -> float:
    memory = np.ones(byte_count // 8, np.uint64)
    address, size, threads = memory.ctypes.data, memory.nbytes, torch.get_num_threads()
    reads: list[Callable[[], object]] = [memory.sum]
    if native_is_here():
        library = native_library()
        # Which of them is fastest is the processor's affair.
        reads = [
            partial(library.read_sum, variant, address, size, threads)
            for variant in library.variants
        ]
    fastest = 0.0
    for _ in range(5):
        for read in reads:
            started = time.perf_counter()
            read()
            fastest = max(fastest, size / (time.perf_counter() - started))
    return fastest


def _drive_rate(cold_dir: Path, byte_count: int) -> float:
    settings, calls = Settings(), DriveCalls()
    pieces = max(1, byte_count // _READ_BYTES)
    chance = np.random.default_rng(0)
    buffer = aligned_buffer(_BATCH * _READ_BYTES)
    buffer[:] = chance.integers(0, 256, len(buffer), np.uint8)
    engine = open_engine(settings.io, settings.io_threads, calls)
    file = ColdFile(cold_dir, probe_io_mode(cold_dir), "a file to measure the drive")
    try:
        for piece in range(pieces):
            file.write(buffer[:_READ_BYTES].data, piece * _READ_BYTES)
        rates = []
        starts = np.arange(_BATCH) * _READ_BYTES
        for _ in range(max(4, pieces // _BATCH)):
            places = chance.integers(0, pieces, _BATCH) * _READ_BYTES
            started = time.perf_counter()
            engine.read(file, buffer, Reads(places, starts, np.full(_BATCH, _READ_BYTES)))
            rates.append(len(buffer) / (time.perf_counter() - started))
    finally:
        file.close()
        engine.close()
    return float(np.median(rates))
