# SPDX-License-Identifier: Apache-2.0
"""Scores on a device what it holds and everything else on the host (HillInfer section 4.2)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow, StoredShadow, pack_query_blocks
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.errors import DeviceError
from hillinfer.native.library import Variant
from hillinfer.native.structures import SEGMENT_WORDS
from hillinfer.scoring.arguments import ScoringArguments, SegmentWords
from hillinfer.scoring.launches import LaunchQueries, NativePieces, Piece
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.native import NativeScorer, native_top
from hillinfer.scoring.scorer import SegmentShadow, StreamedShadow, Wanted, total_tokens
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.beats import Beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import RECENT_TOKENS
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.score_tuples import WINDOW_TOKENS

# --- The host's part ---


class NativePart:
    """Scores the host's tokens with the native library while the device scores the others.

    Raises NativeError where the native library is missing.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self._pieces = NativePieces(spec, scope)
        self._layout = ShadowLayout(spec)
        self._words = SegmentWords(spec.segment_tokens, ScoringArguments(spec).check_arrays)

    def start(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], coming: int = 0
    ) -> StartedScoring:
        """Look at R ∪ Φ, so that the device can be launched (contract, section 6).

        A shadow on the drive that the host looks at is read once, in the order of `segments`: of
        one that the host scores L' stays, and of one with recent tokens a copy. `scaled` comes from
        `NativeScorer.scaled`; the rest is as for `Scorer.score`, with all segments of the sequence.
        """
        threads = torch.get_num_threads()
        recent = total_tokens(segments) + coming - RECENT_TOKENS
        seen: list[SegmentShadow] = []
        passed: dict[int, tuple[NDArray[np.int32], NDArray[np.uint8]]] = {}
        kept: list[NDArray[Any]] = []
        words: list[bytes] = []
        for number, one in enumerate(segments):
            if one.on_drive and one.base_position + one.tokens > recent:
                one = _here(one, one.shadow.copy())
            if not one.on_drive:
                words.append(self._words.of(one, kept))
            elif one.device_tokens < one.tokens:
                brief = _here(one, one.shadow)
                described = array("q", self._words.of(brief, kept))
                passed[number] = self._pieces.log_weights(scaled, described, threads)
                # Until the library was called.
                probes = ProbeShadow.of(self._layout, number, brief.shadow)
                kept.append(probes.shadow)
                words.append(self._words.given(brief, probes, kept))
            else:
                words.append(self._words.given(one, one.probes, kept))
            seen.append(one)
        all_words = array("q", b"".join(words))
        queries, offsets = self._pieces.start(scaled, all_words, threads, coming)
        addresses = all_words[::SEGMENT_WORDS].tolist()
        known = _Known(queries, offsets, passed)
        return StartedScoring(self._pieces, known, seen, addresses, threads, kept)


@dataclass(frozen=True)
class _Known:
    """A query coded for each segment, the offsets, and L' of segments that are gone again."""

    queries: LaunchQueries
    offsets: NDArray[np.int32]
    passed: dict[int, tuple[NDArray[np.int32], NDArray[np.uint8]]]


class StartedScoring:
    """One query against one sequence, with its offsets known; made by `NativePart.start`."""

    def __init__(
        self,
        pieces: NativePieces,
        known: _Known,
        segments: Sequence[SegmentShadow],
        addresses: list[int],
        threads: int,
        kept: list[NDArray[Any]],
    ) -> None:
        self._pieces = pieces
        self._known = known
        self._segments = segments
        # Of shadows, 0 where none is in memory; copies among them live as long as this.
        self._addresses = addresses
        self._kept = kept
        self._threads = threads

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return the query blocks of the segments of some numbers, one behind the other."""
        own, queries = list(numbers), self._known.queries
        return pack_query_blocks(
            self._pieces.spec,
            LaunchQueries(queries.codes[own], queries.exponents[own], queries.addends[own]),
        )

    def tuples(self, wanted: Sequence[tuple[int, range]]) -> Iterator[NDArray[np.uint32]]:
        """Score tokens on the host, those of all shadows in memory at once.

        `wanted` are numbers of segments, and which tokens of each.

        Returns
        -------
        Of each in turn, uint32 of shape (sets, tokens) (contract, section 11).
        """
        if all(self._addresses[number] for number, _ in wanted):
            yield from self._scored(wanted)
            return
        for number, tokens in wanted:
            if number in self._known.passed:
                first = tokens.start // GROUP_TOKENS * GROUP_TOKENS
                own = np.empty((self._pieces.sets, tokens.stop - first), dtype=np.uint32)
                self._finish(number, first, own)
                yield own[:, tokens.start - first :]
            else:
                # Brought back one at a time, after a device was lost.
                yield from self._scored([(number, tokens)])

    def fill(self, wanted: Sequence[tuple[int, range]], tuples: NDArray[np.uint32]) -> None:
        """Score tokens as `tuples` does, into their places among those of the whole sequence.

        What is wanted is as there, each from the start of a group on or after what others have left
        there; `tuples` is uint32 of shape (sets, N), contiguous.
        """
        spec, pieces = self._pieces.spec, []
        for number, tokens in wanted:
            address, base = self._addresses[number], self._segments[number].base_position
            group = tokens.start // GROUP_TOKENS
            first = group * GROUP_TOKENS
            if number in self._known.passed:
                self._finish(number, first, tuples[:, base + first : base + tokens.stop])
            elif not address:
                # Brought back one at a time, after a device was lost.
                for own in self._scored([(number, tokens)]):
                    start = base + tokens.start
                    tuples[:, start : start + len(tokens)] = own
            else:
                address += group * spec.group_beats * BEAT_BYTES
                pieces.append((number, address, base + first, tokens.stop - first))
        if pieces:
            self._pieces.fill(self._known.queries, pieces, tuples, self._threads)

    def _finish(self, number: int, first_token: int, tuples: NDArray[np.uint32]) -> None:
        group = first_token // GROUP_TOKENS
        weights, exponents = self._known.passed[number]
        self._pieces.finish(
            self._known.offsets,
            (weights[group:], exponents[group:]),
            self._segments[number].base_position + first_token,
            tuples,
            self._threads,
        )

    def _scored(self, wanted: Sequence[tuple[int, range]]) -> Iterator[NDArray[np.uint32]]:
        pieces = [self._piece(number, tokens) for number, tokens in wanted]
        made = self._pieces.score(self._known.queries, pieces, self._threads)
        for (_, tokens), own in zip(wanted, made, strict=True):
            yield own[:, tokens.start % GROUP_TOKENS :]

    def _piece(self, number: int, tokens: range) -> Piece:
        segment = self._segments[number]
        first = tokens.start // GROUP_TOKENS * GROUP_TOKENS
        return Piece(
            number, segment.shadow, first, tokens.stop - first, segment.base_position + first
        )


def _here(segment: SegmentShadow, shadow: NDArray[np.uint8]) -> SegmentShadow:
    # Offsets of what a device scores come from the probe tokens that were kept when it got them.
    probes = segment.probes if segment.device_tokens == segment.tokens else None
    return SegmentShadow(segment.base_position, segment.tokens, shadow, segment.statistics, probes)


# --- Both parts ---


@dataclass(frozen=True)
class _Placed:
    """Where the segments of a launch lie, and which shadows the drive has to bring there before."""

    placed: list[DeviceSegment]
    stored: list[StoredShadow]


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

    def _tuples(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow], coming: int
    ) -> NDArray[np.uint32]:
        """Return the tuples of all tokens, whoever scores them."""
        tuples = np.empty((self._sets, total_tokens(segments)), dtype=np.uint32)
        started = self.start(query, scaling, segments, coming)
        for first, own in self._scored(started, segments, partial(self._fill, tuples)):
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
    ) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield a position and the tuples from there on, uint32 (sets, tokens), in any order."""
        given = [number for number, one in enumerate(segments) if one.device_tokens]
        own = [
            (number, range(one.device_tokens, one.tokens))
            for number, one in enumerate(segments)
            if one.device_tokens < one.tokens
        ]
        done = dict.fromkeys(given, 0)
        launches = [*self._launches(segments, given)]
        places = [self._placed([segments[number] for number in one], at) for one, at in launches]
        # What the next launch scores comes from the drive while this one scores.
        overlaps = len(self.shadows.staging) > 1
        try:
            for index, (launch, _) in enumerate(launches):
                if not index or not overlaps:
                    self._load(places[index].stored)
                queries, placed = started.query_blocks(launch), places[index].placed
                ahead = places[index + 1].stored if overlaps and index + 1 < len(places) else ()
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
    def _placed(launch: Sequence[SegmentShadow], slots: range) -> _Placed:
        """Return where the segments of a launch lie, and what of them comes from the drive."""
        placed, stored = [], []
        staging = iter(slots)
        for one in launch:
            if isinstance(one, ResidentShadow):
                slot = one.slot
            else:
                assert isinstance(one, StreamedShadow)
                assert one.place is not None
                slot = next(staging)
                stored.append(StoredShadow(slot, *one.place))
            placed.append(DeviceSegment(slot, one.base_position, one.device_tokens))
        return _Placed(placed, stored)

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
