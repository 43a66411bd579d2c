# SPDX-License-Identifier: Apache-2.0
"""Measures rates with the parts that do the work, and gives a device its share by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow, pack_query_blocks
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import Pace, Resident
from hillinfer.devices.slots import given_rows
from hillinfer.drive.files import PAGE_BYTES, ColdFile, aligned_buffer, probe_io_mode, round_up
from hillinfer.drive.landing import FileRows
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.errors import DeviceError
from hillinfer.model_shape import ModelShape
from hillinfer.rates.kept_rates import KeptRates, Rates, RatesKey, seconds_of
from hillinfer.rates.latency import LATENCY_MODELS, AutoBeta
from hillinfer.scoring.launches import LaunchQueries
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import ImportanceEvaluation, Scorer, SegmentShadow
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.system.machine import largest_cache_bytes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec

# --- Sample shadows ---


def sample_shadows(spec: KernelSpec, count: int) -> list[SegmentShadow]:
    """Return full segments in memory of their own: real exponents, any codes.

    The key mode of `spec` has a shadow.
    """
    generator = np.random.default_rng(0)
    one = _codes(spec, generator)
    shape = (spec.kv_heads, spec.head_dim)
    statistics = ChannelStatistics(
        generator.integers(-2, 3, shape, dtype=np.int8),
        generator.integers(-(2**16), 2**16, shape, dtype=np.int32),
    )
    memory = np.empty((count, *one.shape), dtype=np.uint8)
    memory[:] = one
    layout, length = ShadowLayout(spec), spec.segment_tokens
    segments = []
    for number, own in enumerate(memory):
        probes = ProbeShadow(layout, number)
        probes.take(own, 0, length)
        segments.append(SegmentShadow(number * length, length, own, statistics, probes))
    return segments


def _codes(spec: KernelSpec, generator: np.random.Generator) -> NDArray[np.uint8]:
    shadow = generator.integers(0, 256, (spec.segment_beats, BEAT_BYTES), dtype=np.uint8)
    groups = shadow.reshape(-1, spec.group_beats, BEAT_BYTES)
    exponents = groups[:, : spec.kv_heads]
    exponents[:] = generator.integers(8, 16, exponents.shape, dtype=np.uint8)
    return shadow


# --- Plain drives ---

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
    after the other, as layers are. `engine` reads the drive of `cold_dir`; each measurement takes
    so many `seconds`, beyond making what is measured.
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
                self.scorer.tuples(query, SCALING, segments)

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
            out = aligned_buffer(len(places) * self.row_bytes)[: len(places) * self.row_bytes]
            wanted = FileRows(
                places,
                out.reshape(len(places), self.row_bytes),
                np.arange(len(places)),
                aligned_buffer(_BATCH_ROWS * whole),
                unit_bytes=file.read_unit,
            )
            return self._pace(len(places), lambda: self.engine.land(file, wanted))
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


# --- Devices ---


@dataclass(frozen=True)
class Profiling(PlainProfiling):
    """What is measured, and how long, of a device with the host beside it."""

    scorer: DeviceScorer

    def rates(self) -> Rates:
        """Measure all four rates and what sharing costs.

        Raises DeviceError where the device fails; it is lost then.
        """
        f_c, f_s = self.host_scoring(), self.device_scoring()
        return Rates(
            f_c=f_c, f_s=f_s, b_c=self.copying(), b_s=self.reading(), sharing=self.sharing(f_c, f_s)
        )

    def host_scoring(self) -> float:
        """Return fc: tokens per second that the host scores while a device would score others."""
        spec, scope, parts = self.scorer.spec, self.scorer.scope, []
        tokens, sets = range(spec.segment_tokens), 1 if scope is Scope.LAYER else spec.kv_heads
        query = torch.from_numpy(sample_query(spec.query_heads, spec.head_dim))
        for count in self._stretches():
            segments = sample_shadows(spec, count)
            started = self.scorer.start(query, SCALING, segments)
            wanted = [(number, tokens) for number in range(count)]
            parts.append((started, wanted, np.empty((sets, count * len(tokens)), np.uint32)))

        def score() -> None:
            for started, wanted, tuples in parts:
                started.fill(wanted, tuples)

        return self._pace(sum(len(wanted) for _, wanted, _ in parts) * len(tokens), score)

    def device_scoring(self) -> float:
        """Return fs: tokens per second of a device's launches over shadows that it holds.

        Raises DeviceError where it fails; it is lost then.
        """
        spec, scope, shadows = self.scorer.spec, self.scorer.scope, self.scorer.shadows
        launches = []
        places: list[Resident] = []
        for count in self._stretches():
            held = self._resident(sample_shadows(spec, count), places, count)
            segments = [
                DeviceSegment(one.slot, one.base_position, one.tokens)
                for one in held
                if isinstance(one, ResidentShadow)
            ]
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
        shadows.count_anew()
        return pace

    def sharing(self, f_c: float, f_s: float) -> float:
        """Return the seconds that sharing costs a step of one layer.

        Steps that both sides share, as their rates say, and steps of the host alone take turns. How
        much longer the former take than scoring explains, compared with the latter, is the cost: so
        what both kinds do is in neither, and what slows two sides that score at once is in it.

        `f_c` and `f_s` are as measured. Raises DeviceError where the device fails; it is lost then.
        """
        spec, shadows = self.scorer.spec, self.scorer.shadows
        query = torch.from_numpy(sample_query(spec.query_heads, spec.head_dim))
        evaluation = ImportanceEvaluation(self.scorer, Settings())
        alone, shared, saved = [], [], 0.0
        places: list[Resident] = []
        for count in self._stretches():
            own = sample_shadows(spec, count)
            given = self._resident(own, places, _device_segments(count, f_c, f_s))
            on_device = sum(one.device_tokens for one in given)
            tokens = count * spec.segment_tokens
            if on_device:
                alone.append(own)
                shared.append(given)
                slower = max(seconds_of(tokens - on_device, f_c), seconds_of(on_device, f_s))
                saved += seconds_of(tokens, f_c) - slower

        def step(sequences: list[list[SegmentShadow]]) -> None:
            for segments in sequences:
                evaluation.select(query, SCALING, segments)

        cost = 0.0
        if shared and not shadows.lost:
            by_host, by_both = self._fastest(partial(step, alone), partial(step, shared))
            cost = max(by_both - by_host + saved, 0.0) / len(shared)
        if shadows.lost:
            raise DeviceError("the device failed while it was measured")
        for place in places:
            shadows.give(place)
        shadows.count_anew()
        return cost

    def _resident(
        self, segments: list[SegmentShadow], places: list[Resident], count: int
    ) -> list[SegmentShadow]:
        """Return the same segments, of which the device holds the first so many it has room for."""
        shadows, told = self.scorer.shadows, list(segments)
        for number, own in enumerate(segments[:count]):
            place = shadows.room(number)
            if place is None:
                break
            places.append(place)
            self._give(place, own)
            told[number] = ResidentShadow(
                own.base_position,
                own.tokens,
                own.statistics,
                place.slot,
                own.tokens,
                place.probes,
                None,
                partial(getattr, own, "shadow"),
            )
        return told

    def _give(self, place: Resident, own: SegmentShadow) -> None:
        """Give the device a segment to hold: its shadow, or rows of any keys and values."""
        spec, shadows = self.scorer.spec, self.scorer.shadows
        if not shadows.takes_rows:
            shadows.update(place, own.shadow, own.tokens)
            return
        keys = torch.ones(own.tokens, 2 * spec.kv_heads, spec.head_dim, dtype=torch.float16)
        try:
            with given_rows(spec, place.slot, own.base_position, own.statistics, keys) as given:
                shadows.make([place], [given], [own.shadow])
        except DeviceError as error:
            shadows.lose(error)


def _device_segments(count: int, f_c: float, f_s: float) -> int:
    """Return a device's share of so many segments, of which the host keeps the newest."""
    share = f_s / (f_c + f_s) if f_s else 0.0
    return min(max(round(count * share), 1), count - 1) if share else 0


def _queries(spec: KernelSpec, segments: int) -> LaunchQueries:
    chance = np.random.default_rng(1)
    heads = (segments, spec.scored_heads)
    codes = np.zeros((*heads, spec.padded_head_dim), dtype=np.int8)
    codes[..., : spec.head_dim] = chance.integers(-127, 128, (*heads, spec.head_dim))
    return LaunchQueries(codes, np.full(heads, -7, dtype=np.int32), np.zeros(heads, dtype=np.int32))


# --- β by measured rates ---


def share_by_rates(
    scorer: DeviceScorer,
    shape: ModelShape,
    settings: Settings,
    cold_dir: Path,
    engine: ReadEngine,
    shadow_limit_bytes: int,
) -> None:
    """Let an automatic β decide which segments a device gets (HillInfer section 4.3).

    Rates that are not kept yet are measured, which takes seconds and up to 300 MiB of memory,
    before a cache holds anything. Nothing is done where β is given, or the device is an emulation,
    whose rates say nothing: it is there to be tried and gets every full group. The device of
    `scorer` holds nothing yet. `shadow_limit_bytes` is the most that full shadows take of DRAM:
    what M0 has room for (equation 3).
    """
    shadows, spec = scorer.shadows, scorer.spec
    if settings.beta is not None or shadows.pace is Pace.EMULATED:
        return
    key = RatesKey.of(
        spec,
        scorer.scope,
        shape.row_bytes,
        cold_dir,
        engine.name,
        torch.get_num_threads(),
        settings.device,
        settings.xclbin,
    )
    profiling = Profiling(scorer, shape.row_bytes, cold_dir, engine)
    try:
        rates = KeptRates.of_user().get(key, profiling.rates)
    except DeviceError:
        # Told already; the host scores everything.
        return
    most = shadow_limit_bytes // (shape.layers * shadow_bytes(spec))
    model = LATENCY_MODELS[settings.beta_model](rates)
    shadows.share_by(AutoBeta(model, spec.segment_tokens, settings.importance_rate, most))
