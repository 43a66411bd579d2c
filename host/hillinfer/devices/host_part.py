# SPDX-License-Identifier: Apache-2.0
"""The host's part of scoring beside a device: the offsets first, then its own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device import pack_query_blocks
from hillinfer.native.structures import SEGMENT_WORDS
from hillinfer.scoring.arguments import ScoringArguments, SegmentWords
from hillinfer.scoring.launches import LaunchQueries, NativePieces, Piece
from hillinfer.scoring.layout import ProbeShadow, ShadowLayout
from hillinfer.scoring.scorer import SegmentShadow, total_tokens
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import RECENT_TOKENS


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
