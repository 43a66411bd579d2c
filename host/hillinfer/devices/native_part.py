# SPDX-License-Identifier: Apache-2.0
"""The host's part of a sequence, in C++."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.query_blocks import pack_query_blocks
from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.native_pieces import LaunchQueries, NativePieces, Piece
from hillinfer.hie.offsets import RECENT_TOKENS
from hillinfer.hie.segment_words import SegmentWords
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer.native.structures import SEGMENT_WORDS
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, GROUP_TOKENS, KernelSpec


class NativePart:
    """A `HostPart` that scores its own segments while the device scores the others.

    Parameters
    ----------
    spec, scope
        Shape and rule; what shares one selected set.

    Raises
    ------
    NativeError
        The native library is missing.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self._pieces = NativePieces(spec, scope)
        self._words = SegmentWords(spec.segment_tokens, TorchScorer(spec, scope).check_arrays)

    @staticmethod
    def takes(segments: Sequence[SegmentShadow]) -> bool:
        """Say whether all shadows that the host looks at are in memory."""
        tokens = segments[-1].base_position + segments[-1].tokens
        return not any(
            one.on_drive
            and (
                one.device_tokens < one.tokens
                or one.base_position + one.tokens > tokens - RECENT_TOKENS
            )
            for one in segments
        )

    def start(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], coming: int = 0
    ) -> _Started:
        """Score R ∪ Φ and nothing else; see `HostPart`."""
        threads = torch.get_num_threads()
        kept: list[NDArray[Any]] = []
        words = [
            self._words.probed(one, kept) if one.on_drive else self._words.of(one, kept)
            for one in segments
        ]
        described = array("q", b"".join(words))
        queries = self._pieces.start(scaled, described, threads, coming)
        addresses = described[::SEGMENT_WORDS].tolist()
        return _Started(self._pieces, queries, segments, addresses, threads, kept)


class _Started:
    def __init__(
        self,
        pieces: NativePieces,
        queries: LaunchQueries,
        segments: Sequence[SegmentShadow],
        addresses: list[int],
        threads: int,
        kept: list[NDArray[Any]],
    ) -> None:
        self._pieces = pieces
        self._queries = queries
        self._segments = segments
        # Of shadows, 0 where the device alone has one; copies among them live as long as this.
        self._addresses = addresses
        self._kept = kept
        self._threads = threads

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return query blocks; see `StartedScoring`."""
        own = list(numbers)
        return pack_query_blocks(
            self._pieces.spec,
            LaunchQueries(
                self._queries.codes[own], self._queries.exponents[own], self._queries.addends[own]
            ),
        )

    def tuples(self, wanted: Sequence[tuple[int, range]]) -> Iterator[NDArray[np.uint32]]:
        """Score tokens, those of all shadows in memory at once; see `StartedScoring`."""
        if any(self._segments[number].on_drive for number, _ in wanted):
            # Brought back one at a time, after a device was lost.
            for one in wanted:
                yield from self._scored([one])
        else:
            yield from self._scored(wanted)

    def fill(self, wanted: Sequence[tuple[int, range]], tuples: NDArray[np.uint32]) -> None:
        """Score tokens into their places, whole groups of them; see `StartedScoring`."""
        spec, pieces = self._pieces.spec, []
        for number, tokens in wanted:
            address, base = self._addresses[number], self._segments[number].base_position
            if not address:
                # Brought back one at a time, after a device was lost.
                for own in self._scored([(number, tokens)]):
                    first = base + tokens.start
                    tuples[:, first : first + len(tokens)] = own
                continue
            group = tokens.start // GROUP_TOKENS
            first = group * GROUP_TOKENS
            address += group * spec.group_beats * BEAT_BYTES
            pieces.append((number, address, base + first, tokens.stop - first))
        if pieces:
            self._pieces.fill(self._queries, pieces, tuples, self._threads)

    def end(self) -> None:
        """Do nothing."""

    def _scored(self, wanted: Sequence[tuple[int, range]]) -> Iterator[NDArray[np.uint32]]:
        pieces = [self._piece(number, tokens) for number, tokens in wanted]
        made = self._pieces.score(self._queries, pieces, self._threads)
        for (_, tokens), own in zip(wanted, made, strict=True):
            yield own[:, tokens.start % GROUP_TOKENS :]

    def _piece(self, number: int, tokens: range) -> Piece:
        segment = self._segments[number]
        first = tokens.start // GROUP_TOKENS * GROUP_TOKENS
        return Piece(
            number, segment.shadow, first, tokens.stop - first, segment.base_position + first
        )
