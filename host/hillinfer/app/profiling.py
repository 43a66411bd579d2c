# SPDX-License-Identifier: Apache-2.0
"""Measures rates with the parts that do the work, a device among them, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hillinfer.app.plain_profiling import SCALING, PlainProfiling, sample_query
from hillinfer.app.rates import Rates, seconds_of
from hillinfer.app.sample_shadows import sample_shadows
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import Resident
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.query_blocks import pack_query_blocks
from hillinfer.devices.resident_shadow import ResidentShadow
from hillinfer.devices.scorer import SegmentShadow
from hillinfer.devices.scoring_device import DeviceSegment
from hillinfer.hie.evaluation import ImportanceEvaluation
from hillinfer.hie.native_pieces import LaunchQueries
from hillinfer.settings import Settings
from hillinfer_model.kernel_spec import KernelSpec


@dataclass(frozen=True)
class Profiling(PlainProfiling):
    """What is measured, and how long, of a device with the host beside it.

    Parameters
    ----------
    scorer
        A device's, with the host beside it.
    row_bytes, cold_dir, engine, seconds
        As there.
    """

    scorer: DeviceScorer

    def rates(self) -> Rates:
        """Measure all four rates and what sharing costs.

        Raises
        ------
        DeviceError
            Where the device fails; it is lost then.
        """
        f_c, f_s = self.host_scoring(), self.device_scoring()
        return Rates(
            f_c=f_c,
            f_s=f_s,
            b_c=self.copying(),
            b_s=self.reading(),
            sharing=self.sharing(f_c, f_s),
        )

    def host_scoring(self) -> float:
        """Return fc: tokens per second that the host scores while a device would score others."""
        spec, tokens, parts = self.scorer.spec, range(self.scorer.spec.segment_tokens), []
        query = torch.from_numpy(sample_query(spec.query_heads, spec.head_dim))
        for count in self._stretches():
            segments = sample_shadows(spec, count)
            started = self.scorer.start(query, SCALING, segments)
            parts.append((started, [(number, tokens) for number in range(count)]))

        def score() -> None:
            for started, wanted in parts:
                for _ in started.tuples(wanted):
                    pass

        return self._pace(sum(len(wanted) for _, wanted in parts) * len(tokens), score)

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

    def sharing(self, f_c: float, f_s: float) -> float:
        """Return the seconds that sharing costs a step of one layer.

        Steps that both sides share, as their rates say, and steps of the host alone take turns. How
        much longer the former take than scoring explains, compared with the latter, is the cost: so
        what both kinds do is in neither, and what slows two sides that score at once is in it.

        Parameters
        ----------
        f_c, f_s
            As measured.

        Raises
        ------
        DeviceError
            Where the device fails; it is lost then.
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
        shadows.launches = shadows.scored_tokens = 0
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
            shadows.update(place, own.shadow, own.tokens)
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
