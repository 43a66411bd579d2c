# SPDX-License-Identifier: Apache-2.0
"""Measures rates with the parts that do the work, in seconds."""

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
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import Resident
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.query_blocks import pack_query_blocks
from hillinfer.devices.scoring_device import DeviceSegment
from hillinfer.hie.native_pieces import LaunchQueries
from hillinfer.hie.query_coding import scale_query
from hillinfer.machine.processor import largest_cache_bytes
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.storage.cold_file import ColdFile, probe_io_mode
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.read_plan import plan_reads
from hillinfer_model.kernel_spec import KernelSpec

_SCALING = 0.02
# Caches of servers are larger than what fits into seconds.
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 128 << 20
_STRETCH = 64
_BATCH_ROWS = 512
_FILE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Profiling:
    """What is measured, and how long.

    Shadows are larger than the processor's caches, in stretches of 64 segments that are scored one
    after the other, as layers are.

    Parameters
    ----------
    scorer
        A device's, with the host beside it.
    row_bytes
        Bytes of a row.
    cold_dir
        Directory on the drive.
    engine
        Reads it.
    seconds
        Of each of the four measurements, beyond making what is measured.
    """

    scorer: DeviceScorer
    row_bytes: int
    cold_dir: Path
    engine: ReadEngine
    seconds: float = 0.3

    def rates(self) -> Rates:
        """Measure all four rates.

        Raises
        ------
        DeviceError
            Where the device fails; it is lost then.
        """
        return Rates(
            f_c=self.host_scoring(),
            f_s=self.device_scoring(),
            b_c=self.copying(),
            b_s=self.reading(),
        )

    def host_scoring(self) -> float:
        """Return fc: tokens per second that the host scores while a device would score others."""
        spec, tokens, parts = self.scorer.spec, range(self.scorer.spec.segment_tokens), []
        query = np.random.default_rng(1).normal(0, 1, (spec.query_heads, spec.head_dim))
        scaled = scale_query(spec, torch.from_numpy(query.astype(np.float32)), _SCALING)
        for count in self._stretches():
            segments = sample_shadows(spec, count)
            started = self.scorer.host_part(segments).start(scaled, segments)
            parts.append((started, [(number, tokens) for number in range(count)]))

        def score() -> None:
            for started, wanted in parts:
                for _ in started.tuples(wanted):
                    pass

        pace = self._pace(sum(len(wanted) for _, wanted in parts) * len(tokens), score)
        for started, _ in parts:
            started.end()
        return pace

    def device_scoring(self) -> float:
        """Return fs: tokens per second of a device's launches over shadows that it holds.

        Raises
        ------
        DeviceError
            Where it fails; it is lost then.
        """
        spec, scope, shadows = self.scorer.spec, self.scorer.scope, self.scorer.shadows
        launches = []
        places: list[Resident] = []
        for count in self._stretches():
            segments = []
            for number, own in enumerate(sample_shadows(spec, count)):
                place = shadows.room(number)
                if place is None:
                    break
                places.append(place)
                shadows.update(place, own.shadow, spec.segment_tokens)
                segments.append(DeviceSegment(place.slot, own.base_position, spec.segment_tokens))
            if segments:
                launches.append((pack_query_blocks(spec, _queries(spec, len(segments))), segments))
        if shadows.lost:
            raise DeviceError("the device failed while it was measured")

        def launch() -> None:
            for queries, segments in launches:
                for _ in shadows.score(scope, queries, segments):
                    pass

        try:
            pace = self._pace(len(places) * spec.segment_tokens, launch) if places else 0.0
        except DeviceError as error:
            shadows.lose(error)
            raise
        for place in places:
            shadows.give(place)
        # Nothing of it belongs to a run.
        shadows.launches = shadows.scored_tokens = 0
        return pace

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
        work()
        fastest, ends = math.inf, time.perf_counter() + self.seconds
        while True:
            started = time.perf_counter()
            work()
            now = time.perf_counter()
            fastest = min(fastest, now - started)
            if now >= ends:
                return tokens / fastest

    @staticmethod
    def _places(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        chance = np.random.default_rng(2)
        return np.sort(chance.choice(count, min(_BATCH_ROWS, count), replace=False))


def _queries(spec: KernelSpec, segments: int) -> LaunchQueries:
    chance = np.random.default_rng(1)
    heads = (segments, spec.scored_heads)
    codes = np.zeros((*heads, spec.padded_head_dim), dtype=np.int8)
    codes[..., : spec.head_dim] = chance.integers(-127, 128, (*heads, spec.head_dim))
    return LaunchQueries(codes, np.full(heads, -7, dtype=np.int32), np.zeros(heads, dtype=np.int32))
