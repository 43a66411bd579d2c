# SPDX-License-Identifier: Apache-2.0
"""Scores on a device what it holds and everything else on the host (HillInfer section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow, StoredShadow
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.started_scoring import (
    AskedScoring,
    NativePart,
    StartedScoring,
    shared_passes,
    shared_tuples,
)
from hillinfer.errors import DeviceError
from hillinfer.native.library import Variant
from hillinfer.scoring.native import NativeScorer, native_top
from hillinfer.scoring.scorer import (
    Scorer,
    SegmentShadow,
    StreamedShadow,
    Wanted,
    total_tokens,
)
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec


@dataclass(frozen=True)
class _Begun:
    """A query that was scored with others, and its tuples by number of segment."""

    query: torch.Tensor
    started: StartedScoring
    tuples: Mapping[int, NDArray[np.uint32]]


class EngineScorer(Scorer, Protocol):
    """A `Scorer` as engines open it, with a device or without one."""

    @property
    def on_device(self) -> DeviceScorer | None:
        """What of it scores on a device; None where the host scores everything."""
        ...


class DeviceScorer:
    """A `Scorer` whose segments lie partly on a device.

    The host scores R ∪ Φ first, because the offsets come from them (contract, section 6); the
    device is launched with the offsets and scores while the host goes on with its own tokens. Where
    the device fails, the host scores what is missing with the same offsets. `host` takes
    statistics, codes keys and scores what the device does not hold.
    """

    def __init__(
        self, host: NativeScorer, shadows: DeviceShadows, recorder: Recorder = SILENT
    ) -> None:
        self._recorder = recorder
        self.spec: KernelSpec = host.spec
        self.scope: Scope = host.scope
        self.shadows = shadows
        self._host = host
        self._sets = 1 if host.scope is Scope.LAYER else host.spec.kv_heads
        self._part = NativePart(self.spec, self.scope)
        self._begun: list[_Begun] = []

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics; see `Scorer`."""
        return self._host.statistics(keys, first_position, preceding)

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write codes and exponents into a segment's shadow; see `Scorer`."""
        self._host.encode(keys, statistics, shadow, first_token)

    def tuples(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> NDArray[np.uint32]:
        """Score every token of consecutive segments, on whichever side; see `Scorer`."""
        if self._host_alone(segments):
            return self._host.tuples(query, scaling, segments, coming)
        tuples = np.empty((self._sets, total_tokens(segments)), dtype=np.uint32)
        begun = self._take_begun(query)
        if begun is None:
            self._fill(self.start(query, scaling, segments, coming), segments, {}, tuples)
        else:
            self._fill(begun.started, segments, begun.tuples, tuples)
        return tuples

    def start(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> StartedScoring:
        """Return the host's part of scoring, whose offsets a launch needs; see `NativePart`.

        Parameters and errors are those of `tuples`.
        """
        # Arrays are checked where they are described.
        self._host.check(query, segments)
        return self._part.start(self._host.scaled(query, scaling), segments, coming)

    @property
    def on_device(self) -> DeviceScorer:
        """Itself."""
        return self

    @property
    def table_variant(self) -> Variant | None:
        """None: the processor waits for the device."""
        return None

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Select, and tell the device's share what the first size has of whose; see `Scorer`."""
        if self._host_alone(segments):
            each = self._host.choose(query, scaling, segments, coming, wanted)
        else:
            for one in wanted:
                one.check(total_tokens(segments) + coming, coming)
            tuples = self.tuples(query, scaling, segments, coming)
            each = [native_top(tuples, one, coming) for one in wanted]
        self._note_selected(segments, each[0])
        return each

    def begin_together(self, asked: Sequence[AskedScoring]) -> None:
        """Score what several sequences share on the device, for all of their queries.

        What comes of it is used when the same queries are chosen for next. It is read here: a
        device forgets a launch that nobody reads when it is given another. Errors are those of
        `tuples`; where the device fails nothing has begun.
        """
        self._begun = []
        most = self.shadows.queries_together
        for shared in () if self.shadows.lost or most < 2 else shared_passes(asked, most):
            own = [asked[number] for number in shared.askers]
            started = [self.start(one.query, one.scaling, one.segments, one.coming) for one in own]
            scored = {"segments": len(shared.segments), "queries": len(own)}
            try:
                with self._recorder.span(Lane.DEVICE_SCORING, "launch", **scored):
                    found = shared_tuples(self.spec, self.scope, self.shadows, shared, started)
            except DeviceError as error:
                self.shadows.lose(error)
                self._begun = []
                return
            for one, begun, tuples in zip(own, started, found, strict=True):
                self._begun.append(_Begun(one.query, begun, tuples))

    def _take_begun(self, query: torch.Tensor) -> _Begun | None:
        for number, one in enumerate(self._begun):
            if one.query is query:
                return self._begun.pop(number)
        return None

    def _host_alone(self, segments: Sequence[SegmentShadow]) -> bool:
        return self.shadows.lost or not any(one.device_tokens for one in segments)

    def _note_selected(
        self, segments: Sequence[SegmentShadow], selected: Sequence[NDArray[np.int64]]
    ) -> None:
        """Learn what was selected of what host and device scored (HillInfer section 4.3)."""
        bounds = [
            (one.base_position, one.base_position + one.device_tokens)
            for one in segments
            if one.device_tokens
        ]
        total = total_tokens(segments)
        on_device = sum(stop - start for start, stop in bounds)
        for own in selected:
            edges = np.searchsorted(own, bounds)
            taken = int((edges[:, 1] - edges[:, 0]).sum()) if bounds else 0
            # One that is coming was scored by nobody.
            scored = int(own.searchsorted(total))
            self.shadows.note_selected(total - on_device, scored - taken, on_device, taken)

    def _fill(
        self,
        started: StartedScoring,
        segments: Sequence[SegmentShadow],
        known: Mapping[int, NDArray[np.uint32]],
        tuples: NDArray[np.uint32],
    ) -> None:
        """Put tuples where they belong, uint32 (sets, N), whoever scores them.

        `known` are those that the device gave already, by number of segment.
        """
        given = [number for number, one in enumerate(segments) if one.device_tokens]
        own = [
            (number, range(one.device_tokens, one.tokens))
            for number, one in enumerate(segments)
            if one.device_tokens < one.tokens
        ]
        done = dict.fromkeys(given, 0)

        def take(number: int, first: int, found: NDArray[np.uint32]) -> None:
            start, done[number] = segments[number].base_position + first, first + found.shape[1]
            tuples[:, start : start + found.shape[1]] = found

        # What the next launch scores comes from the drive while this one scores.
        overlaps = len(self.shadows.staging) > 1
        try:
            if known:
                started.fill(own, tuples)
                own = []
                for number, found in known.items():
                    take(number, 0, found)
            launches = [*self._launches(segments, [one for one in given if not done[one]])]
            places = [self._placed(segments, *one) for one in launches]
            for index, (launch, _) in enumerate(launches):
                placed, stored = places[index]
                if not index or not overlaps:
                    self._load(stored)
                queries = started.query_blocks(launch)
                ahead = places[index + 1][1] if overlaps and index + 1 < len(places) else ()
                began = time.perf_counter_ns()
                scoring = self.shadows.score(self.scope, queries, placed, ahead)
                started.fill(own, tuples)
                own = []
                for part in scoring:
                    take(launch[part.segment], part.first_token, part.tuples)
                self._recorder.note(
                    Lane.DEVICE_SCORING,
                    "launch",
                    began,
                    time.perf_counter_ns(),
                    segments=len(placed),
                    tokens=sum(one.tokens for one in placed),
                    loads=len(ahead),
                )
        except DeviceError as error:
            self.shadows.lose(error)
            own += [
                (number, range(done[number], segments[number].device_tokens))
                for number in given
                if done[number] < segments[number].device_tokens
            ]
            started.fill(own, tuples)

    def _launches(
        self, segments: Sequence[SegmentShadow], given: Sequence[int]
    ) -> Iterator[tuple[list[int], range]]:
        """Yield what is scored at once: what lies on the device, then the drive's in pieces.

        With each come slots for what the drive has of it: those of every other piece, so that the
        next piece comes while one is scored.
        """
        resident = [one for one in given if isinstance(segments[one], ResidentShadow)]
        if resident:
            yield resident, range(0)
        streamed = [one for one in given if not isinstance(segments[one], ResidentShadow)]
        slots = self.shadows.staging
        step = max(len(slots) // 2, 1)
        for piece, start in enumerate(range(0, len(streamed), step)):
            own = slots[step:] if piece % 2 and len(slots) > 1 else slots[:step]
            yield streamed[start : start + step], own

    @staticmethod
    def _placed(
        segments: Sequence[SegmentShadow], launch: Sequence[int], slots: range
    ) -> tuple[list[DeviceSegment], list[StoredShadow]]:
        """Return where the segments of a launch lie, and what of them comes from the drive."""
        placed, stored = [], []
        staging = iter(slots)
        for one in [segments[number] for number in launch]:
            if isinstance(one, ResidentShadow):
                slot = one.slot
            else:
                assert isinstance(one, StreamedShadow)
                assert one.place is not None
                slot = next(staging)
                stored.append(StoredShadow(slot, *one.place))
            placed.append(DeviceSegment(slot, one.base_position, one.device_tokens))
        return placed, stored

    def _load(self, stored: Sequence[StoredShadow]) -> None:
        if stored:
            # All at once: their blocks are in flight together.
            with self._recorder.span(Lane.READS, "shadows to device", segments=len(stored)):
                self.shadows.load(stored)
