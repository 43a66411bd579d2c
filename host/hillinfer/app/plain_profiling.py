# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of a plain drive with the parts that do the work, in seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hillinfer.app.rates import Rates
from hillinfer.app.sample_shadows import sample_shadows
from hillinfer.devices.scorer import Scorer
from hillinfer.machine.processor import largest_cache_bytes
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.cold_file import ColdFile, probe_io_mode
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import plan_reads

SCALING = 0.02
# Caches of servers are larger than what fits into seconds.
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 128 << 20
_STRETCH = 64
_BATCH_ROWS = 512
_FILE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_MATRIX_ROWS, _MATRIX_COLUMNS = 1 << 13, 1 << 12


@dataclass(frozen=True)
class PlainProfiling:
    """What is measured, and how long, where one processor scores everything.

    Shadows are larger than the processor's caches, in stretches of 64 segments that are scored one
    after the other, as layers are.

    Parameters
    ----------
    scorer
        Of the device.
    row_bytes
        Bytes of a row.
    cold_dir
        Directory on the drive.
    engine
        Reads it.
    seconds
        Of each measurement, beyond making what is measured.
    """

    scorer: Scorer
    row_bytes: int
    cold_dir: Path
    engine: ReadEngine
    seconds: float = 0.3

    def rates(self) -> Rates:
        """Measure all rates there are; no device scores beside the host."""
        return Rates(f_c=self.host_scoring(), f_s=0, b_c=self.copying(), b_s=self.reading())

    def host_scoring(self) -> float:
        """Return fc: tokens per second that the host scores."""
        spec = self.scorer.spec
        query = torch.from_numpy(sample_query(spec.query_heads, spec.head_dim))
        stretches = [sample_shadows(spec, count) for count in self._stretches()]

        def score() -> None:
            for segments in stretches:
                for _ in self.scorer.score(query, SCALING, segments):
                    pass

        return self._pace(sum(map(len, stretches)) * spec.segment_tokens, score)

    def multiplying(self) -> float:
        """Return weights per second of a product of a matrix, 128 MiB of float32, and a vector."""
        weights = torch.ones(_MATRIX_ROWS, _MATRIX_COLUMNS)
        vector = torch.ones(_MATRIX_COLUMNS)
        return self._pace(weights.numel(), lambda: weights @ vector)

    def copying(self) -> float:
        """Return Bc: tokens per second whose rows are gathered in memory."""
        count = max(_FILE_BYTES // self.row_bytes, _BATCH_ROWS)
        rows = np.ones((count, self.row_bytes), dtype=np.uint8)
        batch = np.empty((_BATCH_ROWS, self.row_bytes), dtype=np.uint8)
        places = self._places(count)
        return self._pace(
            len(places), lambda: np.take(rows, places, axis=0, out=batch[: len(places)])
        )

    def reading(self) -> float:
        """Return Bs: tokens per second whose rows are read from the drive, 512 at a time."""
        file = ColdFile(self.cold_dir, probe_io_mode(self.cold_dir), "rows to measure with")
        try:
            # Drives may be faster with zeros.
            piece = aligned_buffer(_PIECE_BYTES)
            piece[:] = np.random.default_rng(0).integers(0, 256, piece.nbytes, np.uint8)
            for offset in range(0, _FILE_BYTES, piece.nbytes):
                file.write(piece.data, offset)
            places = self._places((_FILE_BYTES - PAGE_BYTES) // self.row_bytes)
            whole = round_up(self.row_bytes + 2 * PAGE_BYTES, PAGE_BYTES)
            buffer = aligned_buffer(_BATCH_ROWS * whole)

            def read() -> None:
                for batch in plan_reads(places, self.row_bytes, buffer.nbytes):
                    self.engine.read(file, buffer, batch)

            return self._pace(len(places), read)
        finally:
            file.close()

    def _stretches(self) -> list[int]:
        """Return the segments of each stretch."""
        least = min(max(2 * largest_cache_bytes(), _LEAST_BYTES), _MOST_BYTES)
        count = -(-least // self.scorer.spec.segment_bytes)
        return [min(count - first, _STRETCH) for first in range(0, count, _STRETCH)]

    def _pace(self, tokens: int, work: Callable[[], object]) -> float:
        """Return tokens per second of the fastest turn, the first one not counted."""
        (fastest,) = self._fastest(work)
        return tokens / fastest

    def _fastest(self, *works: Callable[[], object]) -> list[float]:
        """Return the seconds of the fastest turn of each, the first not counted.

        They take turns, so that what else the machine does meets all of them.
        """
        for work in works:
            work()
        fastest, ends = [math.inf] * len(works), time.perf_counter() + len(works) * self.seconds
        while True:
            for number, work in enumerate(works):
                started = time.perf_counter()
                work()
                now = time.perf_counter()
                fastest[number] = min(fastest[number], now - started)
            if now >= ends:
                return fastest

    @staticmethod
    def _places(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        chance = np.random.default_rng(2)
        return np.sort(chance.choice(count, min(_BATCH_ROWS, count), replace=False))


def sample_query(heads: int, head_dim: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return a query to measure with, float32 of shape (heads, head_dim)."""
    return np.random.default_rng(1).normal(0, 1, (heads, head_dim)).astype(np.float32)
