# SPDX-License-Identifier: Apache-2.0
"""Rates of a drive: reads by their size, writes, and what it loses when both come at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.files import ColdFile, aligned_buffer, probe_io_mode
from hillinfer.drive.read_turns import QUANTUM_BYTES, Apart, Beside, Mixing
from hillinfer.native.structures import ReadWay

# Below this loss writes may as well go beside reads: putting them off gains less than it waits.
_HARMLESS_LOSS = 0.15
_FILE_BYTES = 32 << 20
_SIZES = (64 << 10, 256 << 10, QUANTUM_BYTES, 4 << 20)
_THREADS = 4


@dataclass(frozen=True)
class DriveRates:
    """Rates of one drive, in bytes per second.

    Parameters
    ----------
    sizes, reads
        Bytes of a read, ascending, and the rate of reads of that size, several in flight.
    write
        Of writes of a quantum, one in flight.
    mixing_loss
        μ: the share of its bytes that the drive loses while it reads and writes at once, from 0 to
        1. Where both share one budget evenly it is 0.
    """

    sizes: tuple[int, ...]
    reads: tuple[float, ...]
    write: float
    mixing_loss: float

    def __post_init__(self) -> None:
        """Refuse what is no curve."""
        rates = (*self.reads, self.write)
        if not self.sizes or len(self.sizes) != len(self.reads) or min(rates) <= 0:
            raise ValueError(f"{self.sizes} and {rates} are no curve of rates above 0")
        if any(low >= high for low, high in pairwise(self.sizes)):
            raise ValueError(f"sizes {self.sizes} do not ascend")
        if not 0 <= self.mixing_loss <= 1:
            raise ValueError(f"mixing_loss={self.mixing_loss} must be between 0 and 1")

    def read(self, size: int) -> float:
        """Return the rate of reads of a size, between measured ones by the size's logarithm."""
        return float(np.interp(np.log(size), np.log(self.sizes), self.reads))

    def read_seconds(self, byte_count: int, size: int) -> float:
        """Return R: how long bytes take in reads of a size."""
        return byte_count / self.read(size)

    def mixing(self, reads: int = 1) -> Mixing:
        """Return which transfers the drive had better make at once.

        Parameters
        ----------
        reads
            Most turns of readers at a time.
        """
        return Beside(reads) if self.mixing_loss < _HARMLESS_LOSS else Apart(reads)

    def as_json(self) -> dict[str, Any]:
        """Return it as numbers and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> DriveRates:
        """Return what `as_json` returned.

        Raises
        ------
        ValueError, KeyError, TypeError
            Where it is none of that.
        """
        return cls(
            tuple(int(one) for one in record["sizes"]),
            tuple(float(one) for one in record["reads"]),
            float(record["write"]),
            float(record["mixing_loss"]),
        )


class DriveMeasuring:
    """Measures a drive in a file of 32 MiB, which is gone afterwards; takes about a second.

    Parameters
    ----------
    directory
        On the drive.
    calls
        How it is reached; the operating system itself where None.

    Raises
    ------
    OSError
        Where the drive fails.
    """

    def __init__(self, directory: Path, calls: DriveCalls | None = None) -> None:
        self._calls = calls or DriveCalls()
        self._directory = directory

    def rates(self) -> DriveRates:
        """Return what the drive gives now."""
        mode = probe_io_mode(self._directory, self._calls)
        file = ColdFile(self._directory, mode, "rates of the drive", self._calls)
        other = ColdFile(self._directory, mode, "rates of the drive", self._calls)
        try:
            # Drives may be faster with zeros.
            data = aligned_buffer(_FILE_BYTES)
            data[:] = np.random.default_rng(0).integers(0, 256, len(data), np.uint8)
            for one in (file, other):
                self._write(one, data)
            writing = min(self._seconds(partial(self._write, other, data)) for _ in range(2))
            into = aligned_buffer(_FILE_BYTES)
            reading = [
                min(self._seconds(partial(self._read, file, into, size)) for _ in range(2))
                for size in _SIZES
            ]
            both = self._mixed(partial(self._write, other, data), file, into)
        finally:
            file.close()
            other.close()
        alone = reading[_SIZES.index(QUANTUM_BYTES)]
        share = both[0] / (_FILE_BYTES / alone) + both[1] / (_FILE_BYTES / writing)
        return DriveRates(
            _SIZES,
            tuple(_FILE_BYTES / one for one in reading),
            _FILE_BYTES / writing,
            float(np.clip(1 - share, 0, 1)),
        )

    def _mixed(
        self, write: Callable[[], None], file: ColdFile, into: np.ndarray
    ) -> tuple[float, float]:
        """Return the rates of reading and of writing while both go on."""
        ended = threading.Event()
        done = 0

        def read() -> None:
            nonlocal done
            while not ended.is_set():
                self._read(file, into, QUANTUM_BYTES)
                done += 1

        reader = threading.Thread(target=read, name="hillinfer-rates")
        started = time.perf_counter()
        reader.start()
        try:
            seconds = self._seconds(write)
        finally:
            ended.set()
            reader.join()
        whole = time.perf_counter() - started
        return done * _FILE_BYTES / whole, _FILE_BYTES / seconds

    def _read(self, file: ColdFile, into: np.ndarray, size: int) -> None:
        way = ReadWay(watch=self._calls.watch, descriptor=file.descriptor, threads=_THREADS)
        results = self._calls.read_many(
            way, Reads.in_pieces(0, _FILE_BYTES, size), into.ctypes.data
        )
        if results is None or (results < 0).any():
            raise OSError(f"{self._directory} cannot be read")

    @staticmethod
    def _write(file: ColdFile, data: np.ndarray) -> None:
        for offset in range(0, _FILE_BYTES, QUANTUM_BYTES):
            file.write(data[offset : offset + QUANTUM_BYTES].data, offset)

    @staticmethod
    def _seconds(work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
