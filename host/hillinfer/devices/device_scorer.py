# SPDX-License-Identifier: Apache-2.0
"""Scores on a device what it holds and everything else on the host (HillInfer section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow, StoredShadow
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.started_scoring import (
    AskedScoring,
    NativePart,
    SharedScores,
    StartedScoring,
    shared_passes,
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
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.score_tuples import WINDOW_TOKENS


@dataclass(frozen=True)
class _Begun:
    """A query whose scoring began with others', and what waits for its tuples by segment."""

    query: torch.Tensor
    started: StartedScoring
    tuples: Callable[[], Mapping[int, NDArray[np.uint32]]]


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

    def score(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments; see `Scorer`.

        Blocks of different segments come in any order.
        """
        if self._host_alone(segments):
            return self._host.score(query, scaling, segments, coming)
        parts = self._scored(self.start(query, scaling, segments, coming), segments, self._on_host)
        return (block for first, tuples in parts for block in self._cut(first, tuples))

    def start(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> StartedScoring:
        """Return the host's part of scoring, whose offsets a launch needs; see `NativePart`.

        Parameters and errors are those of `score`.
        """
        # Arrays are checked where they are described.
        self._host.check(query, segments)
        return self._part.start(self._host.scaled(query, scaling), segments, coming)

    @property
    def on_device(self) -> DeviceScorer:
        """Itself."""
        return self

    @property
    def is_fast(self) -> bool:
        """Say that it is not: the processor waits for the device."""
        return False

    @property
    def table_variant(self) -> Variant | None:
        """None: the library does not choose over its tables as this does."""
        return None

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Wanted,
    ) -> list[NDArray[np.int64]]:
        """Select, and tell the device's share what was selected of whose tokens; see `Scorer`.

        Picking the top of all tuples at once takes less time than merging blocks while they come.
        """
        if self._host_alone(segments):
            sets = self._host.choose(query, scaling, segments, coming, wanted)
        else:
            wanted.check(total_tokens(segments) + coming, coming)
            sets = native_top(self._tuples(query, scaling, segments, coming), wanted, coming)
        self._note_selected(segments, sets)
        return sets

    def choose_each(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Select sets of several sizes likewise; what the first size selects is told."""
        if self._host_alone(segments):
            each = self._host.choose_each(query, scaling, segments, coming, wanted)
        else:
            for one in wanted:
                one.check(total_tokens(segments) + coming, coming)
            tuples = self._tuples(query, scaling, segments, coming)
            each = [native_top(tuples, one, coming) for one in wanted]
        self._note_selected(segments, each[0])
        return each

    def begin_together(self, asked: Sequence[AskedScoring]) -> None:
        """Score what several sequences share on the device, for all of their queries.

        What comes of it is used when the same queries are chosen for next. It is read here: a
        device forgets a launch that nobody reads when it is given another. Errors are those of
        `score`; where the device fails nothing has begun.
        """
        self._begun = []
        most = self.shadows.queries_together
        for shared in () if self.shadows.lost or most < 2 else shared_passes(asked, most):
            own = [asked[number] for number in shared.askers]
            started = [self.start(one.query, one.scaling, one.segments, one.coming) for one in own]
            scored = {"segments": len(shared.segments), "queries": len(own)}
            try:
                with self._recorder.span(Lane.DEVICE_SCORING, "launch", **scored):
                    scores = SharedScores(self.spec, self.scope, self.shadows, shared, started)
                    scores.tuples(0)
            except DeviceError as error:
                self.shadows.lose(error)
                self._begun = []
                return
            for number, (one, begun) in enumerate(zip(own, started, strict=True)):
                self._begun.append(_Begun(one.query, begun, partial(scores.tuples, number)))

    def _take_begun(self, query: torch.Tensor) -> _Begun | None:
        for number, one in enumerate(self._begun):
            if one.query is query:
                return self._begun.pop(number)
        return None

    def _tuples(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow], coming: int
    ) -> NDArray[np.uint32]:
        """Return the tuples of all tokens, whoever scores them."""
        tuples = np.empty((self._sets, total_tokens(segments)), dtype=np.uint32)
        begun = self._take_begun(query)
        started = begun.started if begun else self.start(query, scaling, segments, coming)
        known = begun.tuples if begun else None
        for first, own in self._scored(started, segments, partial(self._fill, tuples), known):
            tuples[:, first : first + own.shape[1]] = own
        return tuples

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

    def _scored(
        self,
        started: StartedScoring,
        segments: Sequence[SegmentShadow],
        on_host: Callable[..., Iterable[tuple[int, NDArray[np.uint32]]]],
        known: Callable[[], Mapping[int, NDArray[np.uint32]]] | None = None,
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield a position and the tuples from there on, uint32 (sets, tokens), in any order.

        `known` waits for what the device was asked for already, by number of segment.
        """
        given = [number for number, one in enumerate(segments) if one.device_tokens]
        own = [
            (number, range(one.device_tokens, one.tokens))
            for number, one in enumerate(segments)
            if one.device_tokens < one.tokens
        ]
        done = dict.fromkeys(given, 0)
        # What the next launch scores comes from the drive while this one scores.
        overlaps = len(self.shadows.staging) > 1
        try:
            if known is not None:
                yield from on_host(started, segments, own)
                own = []
                for number, tuples in known().items():
                    yield segments[number].base_position, tuples
                    done[number] = tuples.shape[1]
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
                yield from on_host(started, segments, own)
                own = []
                for found in scoring:
                    number = launch[found.segment]
                    base = segments[number].base_position
                    yield base + found.first_token, found.tuples
                    done[number] = found.first_token + found.tuples.shape[1]
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
            yield from on_host(started, segments, own)

    @staticmethod
    def _on_host(
        started: StartedScoring,
        segments: Sequence[SegmentShadow],
        wanted: Sequence[tuple[int, range]],
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        if wanted:
            for (number, tokens), tuples in zip(wanted, started.tuples(wanted), strict=True):
                yield segments[number].base_position + tokens.start, tuples

    @staticmethod
    def _fill(
        tuples: NDArray[np.uint32],
        started: StartedScoring,
        segments: Sequence[SegmentShadow],
        wanted: Sequence[tuple[int, range]],
    ) -> Iterable[tuple[int, NDArray[np.uint32]]]:
        """Put the host's tuples where they belong, so that none are left to hand out."""
        started.fill(wanted, tuples)
        return ()

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

    def _cut(self, first: int, tuples: NDArray[np.uint32]) -> Iterator[ScoreBlock]:
        """Yield blocks of tuples of one segment, which never crosses a window."""
        window = first // WINDOW_TOKENS * WINDOW_TOKENS
        for start in range(0, tuples.shape[1], self.spec.block_tokens):
            for row, own in enumerate(tuples[:, start : start + self.spec.block_tokens]):
                yield ScoreBlock(row, window, own)
