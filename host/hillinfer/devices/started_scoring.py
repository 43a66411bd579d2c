# SPDX-License-Identifier: Apache-2.0
"""Scoring that has begun beside a device: the host's part, and passes that sequences share."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import DeviceSegment, ResidentShadow, pack_query_blocks
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.native.structures import SEGMENT_WORDS
from hillinfer.scoring.arguments import ScoringArguments, SegmentWords
from hillinfer.scoring.launches import LaunchQueries, NativePieces
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import SegmentShadow, total_tokens
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import RECENT_TOKENS

# --- The host's part of one sequence ---


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
        `NativeScorer.scaled`; the rest is as for `Scorer.tuples`, all segments of the sequence.
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
        return StartedScoring(
            self._pieces, queries, offsets, passed, seen, addresses, kept, threads
        )


@dataclass(frozen=True, eq=False)
class StartedScoring:
    """One query against one sequence, with its offsets known; made by `NativePart.start`.

    The query is coded for each segment; `passed` has L' of segments that are gone again, by number.
    """

    pieces: NativePieces
    queries: LaunchQueries
    offsets: NDArray[np.int32]
    passed: dict[int, tuple[NDArray[np.int32], NDArray[np.uint8]]]
    segments: Sequence[SegmentShadow]
    # Of shadows, 0 where none is in memory; copies among them live as long as this.
    addresses: list[int]
    kept: list[NDArray[Any]]
    threads: int

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return the query blocks of the segments of some numbers, one behind the other."""
        own, queries = list(numbers), self.queries
        return pack_query_blocks(
            self.pieces.spec,
            LaunchQueries(queries.codes[own], queries.exponents[own], queries.addends[own]),
        )

    def fill(self, wanted: Sequence[tuple[int, range]], tuples: NDArray[np.uint32]) -> None:
        """Score tokens on the host into their places among the tuples of the whole sequence.

        `wanted` are numbers of segments, and which tokens of each, whose groups are filled from
        their start on, with what others have left there. Of all shadows in memory at once. `tuples`
        is uint32 of shape (sets, N), contiguous (contract, section 11).
        """
        pieces = []
        for number, tokens in wanted:
            address, base = self.addresses[number], self.segments[number].base_position
            first = tokens.start // GROUP_TOKENS * GROUP_TOKENS
            if number in self.passed:
                self._finish(number, first, tuples[:, base + first : base + tokens.stop])
            elif address:
                pieces.append(self._piece(number, address, tokens))
            else:
                # Brought back one at a time, after a device was lost.
                shadow = self.segments[number].shadow
                piece = self._piece(number, shadow.ctypes.data, tokens)
                self.pieces.fill(self.queries, [piece], tuples, self.threads)
        if pieces:
            self.pieces.fill(self.queries, pieces, tuples, self.threads)

    def _piece(self, number: int, address: int, tokens: range) -> tuple[int, int, int, int]:
        """Return what is filled of a segment whose shadow lies at an address."""
        group, base = tokens.start // GROUP_TOKENS, self.segments[number].base_position
        first = group * GROUP_TOKENS
        address += group * self.pieces.spec.group_beats * BEAT_BYTES
        return number, address, base + first, tokens.stop - first

    def _finish(self, number: int, first_token: int, tuples: NDArray[np.uint32]) -> None:
        group = first_token // GROUP_TOKENS
        weights, exponents = self.passed[number]
        self.pieces.finish(
            self.offsets,
            (weights[group:], exponents[group:]),
            self.segments[number].base_position + first_token,
            tuples,
            self.threads,
        )


def _here(segment: SegmentShadow, shadow: NDArray[np.uint8]) -> SegmentShadow:
    # Offsets of what a device scores come from the probe tokens that were kept when it got them.
    probes = segment.probes if segment.device_tokens == segment.tokens else None
    return SegmentShadow(segment.base_position, segment.tokens, shadow, segment.statistics, probes)


# --- Queries that are asked together ---


@dataclass(frozen=True)
class AskedScoring:
    """What one sequence's scores are asked for with; as `Scorer.tuples` takes it."""

    query: torch.Tensor
    scaling: float
    segments: Sequence[SegmentShadow]
    coming: int


Choice = TypeVar("Choice")
Chosen = TypeVar("Chosen")


class ChoiceGroup(Generic[Choice, Chosen]):
    """Choices of one layer for several sequences, made by `choose` when the first is needed."""

    def __init__(self, choose: Callable[[list[Choice]], list[Chosen]]) -> None:
        self._choose = choose
        self.choices: list[Choice] = []
        self._chosen: list[Chosen] | None = None
        self._complete = threading.Event()

    def add(self, coming: Choice) -> Callable[[], Chosen]:
        """Add one; return what gives its choice to the scoring thread, which waits for `end`."""
        number = len(self.choices)
        self.choices.append(coming)

        def choice() -> Chosen:
            self._complete.wait()
            if self._chosen is None:
                self._chosen = self._choose(self.choices)
            return self._chosen[number]

        return choice

    def end(self) -> None:
        """Say that no more are added."""
        self._complete.set()


# --- Passes ---


@dataclass(frozen=True)
class SharedPass:
    """One launch for several queries, of `askers` by their number among those asked together.

    `numbers` says for each asker which of its segments are scored, `segments` where they lie on the
    device.
    """

    askers: list[int]
    numbers: list[list[int]]
    segments: list[DeviceSegment]


def shared_passes(asked: Sequence[AskedScoring], most: int) -> Iterator[SharedPass]:
    """Yield passes, of `most` queries at most, over segments that several sequences share.

    Such segments lie once on a device.
    """
    places = [
        {
            DeviceSegment(own.slot, own.base_position, own.device_tokens): number
            for number, own in enumerate(one.segments)
            if isinstance(own, ResidentShadow) and own.device_tokens
        }
        for one in asked
    ]
    waiting = list(range(len(asked)))
    while len(waiting) > 1:
        askers = [waiting.pop(0)]
        common = {*places[askers[0]]}
        for other in list(waiting):
            both = common & places[other].keys()
            if both and len(askers) < most:
                askers.append(other)
                waiting.remove(other)
                common = both
        if len(askers) > 1:
            segments = sorted(common, key=lambda own: own.base_position)
            numbers = [[places[asker][own] for own in segments] for asker in askers]
            yield SharedPass(askers, numbers, segments)


def shared_tuples(
    spec: KernelSpec,
    scope: Scope,
    shadows: DeviceShadows,
    shared: SharedPass,
    started: Sequence[StartedScoring],
) -> list[dict[int, NDArray[np.uint32]]]:
    """Launch a pass on a device, wait for it, and return each asker's tuples of its segments.

    They are uint32 of shape (sets, tokens) by number of segment (contract, section 17). `started`
    is the query of each asker. Raises DeviceError where the device fails.
    """
    count, sets = len(shared.segments), 1 if scope is Scope.LAYER else spec.kv_heads
    blocks = [
        one.query_blocks(numbers).reshape(count, -1)
        for one, numbers in zip(started, shared.numbers, strict=True)
    ]
    # Of each segment the queries of all askers, one behind the other.
    queries = np.concatenate(blocks, axis=1).reshape(-1, BEAT_BYTES)
    made: list[dict[int, NDArray[np.uint32]]] = [
        {
            number: np.empty((sets, segment.tokens), dtype=np.uint32)
            for number, segment in zip(numbers, shared.segments, strict=True)
        }
        for numbers in shared.numbers
    ]
    for found in shadows.score(scope, queries, shared.segments):
        stop = found.first_token + found.tuples.shape[1]
        parts = found.tuples.reshape(len(made), sets, -1)
        for tuples, numbers, part in zip(made, shared.numbers, parts, strict=True):
            tuples[numbers[found.segment]][:, found.first_token : stop] = part
    return made
