# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads its memory and its drive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.machine.memory import MemoryFacts
from hillinfer.native.library import native_is_here, native_library
from hillinfer.settings import Settings
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.cold_file import ColdFile, probe_io_mode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_engines import open_engine
from hillinfer.storage.reads import Reads

_READ_BYTES = 1 << 20
_BATCH = 32
# The channels of a large linear layer.
_CHANNELS = 4096
_MEMORY_ROUNDS = 6


@dataclass(frozen=True)
class MachineRates:
    """Bytes per second at best, measured before the first case: limits are made of them.

    Parameters
    ----------
    memory
        Reading memory once, with all compute threads: the fastest of all that can read it.
    drive
        The fastest batch of reads of 1 MiB past the page cache, in order or at random, with the
        product's own read engine.
    """

    memory: float
    drive: float

    @classmethod
    def measure(
        cls, cold_dir: Path, memory_bytes: int = 1 << 30, drive_bytes: int = 512 << 20
    ) -> MachineRates:
        """Measure both; writes a file of `drive_bytes` on the drive for the time of it.

        Where memory has no room for four times `memory_bytes`, it reads a quarter of what is free.
        """
        room = MemoryFacts.read().available_bytes // 4
        return cls(_memory_rate(min(memory_bytes, room)), _drive_rate(cold_dir, drive_bytes))

    def shown_by_floor(self, weight_bytes: int, floor_ms: float) -> MachineRates:
        """Return the rates with a memory no slower than a floor step has shown it to be.

        Parameters
        ----------
        weight_bytes
            Weights that each step reads.
        floor_ms
            The fastest step without a context.
        """
        return replace(self, memory=max(self.memory, weight_bytes / floor_ms * 1e3))


def memory_readers(memory: NDArray[np.float32]) -> dict[str, Callable[[], object]]:
    """Return all ways to read memory once, with all compute threads, by name.

    Streaming reads of each variant that this processor runs, and the matrix-vector product of torch
    that linear layers are, in 32 and in 16 bits: which is fastest differs between machines.

    Parameters
    ----------
    memory
        What they read, a multiple of 4,096 numbers.
    """
    threads = torch.get_num_threads()
    readers: dict[str, Callable[[], object]] = {}
    if native_is_here():
        library = native_library()
        for variant in library.variants:
            readers[f"native {variant.value}"] = partial(
                library.read_sum, variant, memory.ctypes.data, memory.nbytes, threads
            )
    for kind in (torch.float32, torch.bfloat16):
        weights = torch.from_numpy(memory).view(kind).view(-1, _CHANNELS)
        name = str(kind).removeprefix("torch.")
        readers[f"linear {name}"] = partial(
            torch.nn.functional.linear, torch.ones(1, _CHANNELS, dtype=kind), weights
        )
    return readers


def _memory_rate(byte_count: int) -> float:
    numbers = max(_CHANNELS, byte_count // 4 // _CHANNELS * _CHANNELS)
    memory = np.ones(numbers, np.float32)
    readers = memory_readers(memory)
    least = float("inf")
    # In turns, so that what else the machine does falls on all of them.
    for _ in range(_MEMORY_ROUNDS):
        for read in readers.values():
            started = time.perf_counter()
            read()
            least = min(least, time.perf_counter() - started)
    return memory.nbytes / least


def _drive_rate(cold_dir: Path, byte_count: int) -> float:
    settings, calls = Settings(), DriveCalls()
    pieces = max(_BATCH, byte_count // _READ_BYTES)
    chance = np.random.default_rng(0)
    buffer = aligned_buffer(_BATCH * _READ_BYTES)
    buffer[:] = chance.integers(0, 256, len(buffer), np.uint8)
    engine = open_engine(settings.io, settings.io_threads, calls)
    file = ColdFile(cold_dir, probe_io_mode(cold_dir), "a file to measure the drive")
    try:
        for piece in range(pieces):
            file.write(buffer[:_READ_BYTES].data, piece * _READ_BYTES)
        least = float("inf")
        starts = np.arange(_BATCH) * _READ_BYTES
        for first in range(0, pieces - _BATCH + 1, _BATCH):
            scattered = chance.integers(0, pieces, _BATCH)
            for places in (np.arange(first, first + _BATCH), scattered):
                reads = Reads(places * _READ_BYTES, starts, np.full(_BATCH, _READ_BYTES))
                started = time.perf_counter()
                engine.read(file, buffer, reads)
                least = min(least, time.perf_counter() - started)
    finally:
        file.close()
        engine.close()
    return len(buffer) / least
