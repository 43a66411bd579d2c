# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads its memory and its drive, at the start and between turns of steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import ColdFile, aligned_buffer, probe_io_mode
from hillinfer.native.library import native_library
from hillinfer.settings import Settings
from hillinfer.system.machine import MemoryFacts, largest_cache_bytes
from hillinfer_bench.native_reads import read_sum
from hillinfer_bench.report.rows import MachineRates

_READ_BYTES = 1 << 20
_BATCH = 32
# Sizes and counts: ten milliseconds each of a virtual machine's drive.
_SCATTERED = ((4 << 10, 1024), (16 << 10, 512), (64 << 10, 192))
# The channels of a large linear layer.
_CHANNELS = 4096
_MEMORY_ROUNDS = 6
# As long as a step: readings of some milliseconds differ by more than what a step gets does.
_HELD_SECONDS = 0.1
# What is read once in a round of so many times the largest cache is hardly there the next time.
_CACHES = 4


Readers = Mapping[str, Callable[[], object]]


class RateSource(Protocol):
    """Says how fast memory and drive are.

    Attributes
    ----------
    start
        Measured before the first case, at length.
    """

    start: MachineRates

    def sample(self) -> MachineRates:
        """Measure both once more, in some tenths of a second."""
        ...


class RateProbe:
    """Measures memory and drive, once at length and then as often as asked; a context manager.

    It keeps a file on the drive and some memory while it lives, so that a short measurement has
    nothing to prepare. A short one reads the next parts of that memory, so that it finds none of it
    in the processor's caches, some of which hold 300 MiB. Memory's rate is what it holds for a
    tenth of a second and more, as long as the shortest step that is compared with it.

    Parameters
    ----------
    cold_dir
        Existing directory on the drive.
    memory_bytes, drive_bytes
        Read at the start, of memory at least four times `cache_bytes`; where memory has no room
        for four times as much, a quarter of what is free.
    cache_bytes
        What the processor's largest cache holds; None to ask.
    part_bytes
        Of which a short measurement reads as many as it has time for.
    readers
        All ways to read some memory, by name; `memory_readers` where None.
    held_seconds
        For which memory is read at least, each time.

    Attributes
    ----------
    start
        As in `RateSource`.
    """

    def __init__(
        self,
        cold_dir: Path,
        memory_bytes: int = 1 << 30,
        drive_bytes: int = 512 << 20,
        cache_bytes: int | None = None,
        part_bytes: int = 256 << 20,
        readers: Callable[[NDArray[np.float32]], Readers] | None = None,
        held_seconds: float = _HELD_SECONDS,
    ) -> None:
        readers = memory_readers if readers is None else readers
        if cache_bytes is None:
            cache_bytes = largest_cache_bytes()
        room = MemoryFacts.read().available_bytes // 4
        # Streaming readers know only where it is.
        self._memory = _ones(min(max(memory_bytes, _CACHES * cache_bytes), room))
        fastest, memory = fastest_reader(readers(self._memory), self._memory.nbytes, held_seconds)
        numbers = len(self._memory)
        own = min(numbers, part_bytes // 4 // _CHANNELS * _CHANNELS)
        parts = [self._memory[first : first + own] for first in range(0, numbers - own + 1, own)]
        self._part_bytes, self._held_seconds = parts[0].nbytes, held_seconds
        self._read_next = itertools.cycle([readers(part)[fastest] for part in parts])
        self._drive = _DriveProbe(cold_dir, drive_bytes)
        try:
            rate = self._drive.rate_of_all()
            self.start = MachineRates(memory, rate, self._drive.scattered())
        except BaseException:
            self._drive.close()
            raise

    def sample(self) -> MachineRates:
        """Measure both once more; see `RateSource`."""
        memory = held_rate(self._read_next, self._part_bytes, self._held_seconds)
        return MachineRates(memory, self._drive.rate_of_next(), self._drive.scattered())

    def close(self) -> None:
        """Remove the file and give the memory back."""
        self._drive.close()

    def __enter__(self) -> RateProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def memory_readers(memory: NDArray[np.float32]) -> Readers:
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
    library = native_library()
    for variant in library.variants:
        readers[f"native {variant.value}"] = partial(
            read_sum, variant, memory.ctypes.data, memory.nbytes, threads
        )
    for kind in (torch.float32, torch.bfloat16):
        weights = torch.from_numpy(memory).view(kind).view(-1, _CHANNELS)
        name = str(kind).removeprefix("torch.")
        readers[f"linear {name}"] = partial(
            torch.nn.functional.linear, torch.ones(1, _CHANNELS, dtype=kind), weights
        )
    return readers


def fastest_reader(
    readers: Mapping[str, Callable[[], object]],
    byte_count: int,
    seconds: float = _HELD_SECONDS,
    rounds: int = _MEMORY_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, float]:
    """Return the name of the fastest reader, and its bytes per second in its fastest round.

    They read in turns, so that what else the machine does falls on all of them.

    Parameters
    ----------
    readers
        Each reads `byte_count` bytes.
    byte_count
        What rates are of.
    seconds
        How long a round takes at least.
    rounds
        Turns of each.
    clock
        Gives the time in seconds.
    """
    best = dict.fromkeys(readers, 0.0)
    for _ in range(rounds):
        for name, read in readers.items():
            rate = held_rate(itertools.repeat(read), byte_count, seconds, clock)
            best[name] = max(best[name], rate)
    fastest = max(best, key=lambda name: best[name])
    return fastest, best[fastest]


def held_rate(
    reads: Iterator[Callable[[], object]],
    byte_count: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return bytes per second of as many reads, one at least, as take so many seconds together.

    Parameters
    ----------
    reads
        Each reads `byte_count` bytes.
    byte_count
        What the rate is of.
    seconds
        What is read before they have passed is not all yet.
    clock
        Gives the time in seconds.
    """
    started = clock()
    for count, read in enumerate(reads, 1):
        read()
        passed = clock() - started
        if passed >= seconds:
            return count * byte_count / passed
    raise ValueError("there are no reads left")


class _DriveProbe:
    """A file of random bytes, read in batches by the product's own engine."""

    def __init__(self, cold_dir: Path, byte_count: int) -> None:
        settings = Settings()
        self._pieces = max(_BATCH, byte_count // _READ_BYTES)
        self._chance = np.random.default_rng(0)
        self._buffer = aligned_buffer(_BATCH * _READ_BYTES)
        self._buffer[:] = self._chance.integers(0, 256, len(self._buffer), np.uint8)
        self._next = 0
        self._engine = open_engine(settings.io, settings.io_threads, DriveCalls())
        try:
            self._file = ColdFile(cold_dir, probe_io_mode(cold_dir), "a file to measure the drive")
        except BaseException:
            self._engine.close()
            raise
        try:
            for piece in range(self._pieces):
                self._file.write(self._buffer[:_READ_BYTES].data, piece * _READ_BYTES)
        except BaseException:
            self.close()
            raise

    def rate_of_all(self) -> float:
        """Return bytes per second of the fastest batch of a pass over the file."""
        return max(self.rate_of_next() for _ in range(self._pieces // _BATCH))

    def rate_of_next(self) -> float:
        """Return bytes per second of the faster of two batches: the next, and a scattered one."""
        first = self._next
        self._next = first + _BATCH if first + 2 * _BATCH <= self._pieces else 0
        scattered = self._chance.integers(0, self._pieces, _BATCH)
        ordered = np.arange(first, first + _BATCH)
        return max(self._rate(places) for places in (ordered, scattered))

    def scattered(self) -> tuple[tuple[int, float], ...]:
        """Return seconds of a read in a batch of scattered ones, of several sizes."""
        found = []
        for size, count in _SCATTERED:
            places = self._chance.integers(0, self._pieces * (_READ_BYTES // size), count)
            found.append((size, self._seconds(places, size) / count))
        return tuple(found)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self._engine.close()

    def _rate(self, places: NDArray[np.int64]) -> float:
        return len(self._buffer) / self._seconds(places, _READ_BYTES)

    def _seconds(self, places: NDArray[np.int64], size: int) -> float:
        """Return how long reads of a size take, at multiples of it."""
        count = len(places)
        reads = Reads(places * size, np.arange(count) * size, np.full(count, size))
        started = time.perf_counter()
        self._engine.read(self._file, self._buffer, reads)
        return time.perf_counter() - started


def _ones(byte_count: int) -> NDArray[np.float32]:
    return np.ones(max(_CHANNELS, byte_count // 4 // _CHANNELS * _CHANNELS), np.float32)
