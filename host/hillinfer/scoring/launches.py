# SPDX-License-Identifier: Apache-2.0
"""Scores segments of a launch in C++, piece by piece, in the caller or a thread of its own."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import NativeError, Variant, native_library
from hillinfer.native.structures import PIECE_WORDS, SEGMENT_WORDS, Addresses, Shape
from hillinfer.native.structures import Sequence as NativeSequence
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.scores import offset_count

# --- The scoring thread ---


class LaunchThread:
    """Scores one launch after the other, without Python's global lock, beside its caller.

    Raises
    ------
    NativeError
        The library is missing.
    """

    def __init__(self) -> None:
        self._library = native_library()
        thread = self._library.make("hillinfer_launches_open")
        self._thread: int | None = thread
        # What launches under way read and write. The finalizer has it, too: where nobody closes the
        # thread, nothing else may be left when it ends.
        self._held: list[object] = []
        # A thread that nobody closed ends with this object; no process waits for it to exit.
        close = self._library.closing("hillinfer_launches_close")
        self._end = weakref.finalize(self, _close, close, thread, self._held)
        self._end.atexit = False

    def begin(
        self, variant: Variant, sequence: object, pieces: int, count: int, held: object
    ) -> None:
        """Begin a launch, after the one before.

        Parameters
        ----------
        sequence
            A reference to a `Sequence`, of which shape and threads are looked at.
        pieces, count
            Address and number of pieces.
        held
            What has them and what they point to; kept until the launch is over.

        Raises
        ------
        NativeError
            It is closed.
        """
        if self._thread is None:
            raise NativeError("the thread for launches is closed")
        # Noted first: an interrupt must not free what a launch has begun to read.
        self._held.append(held)
        self._library.call_holding(
            "hillinfer_launches_begin", self._thread, variant.number, sequence, pieces, count
        )
        # The one before is over now.
        del self._held[:-1]

    def wait(self) -> None:
        """Return when no launch is under way.

        Raises
        ------
        MemoryError
            The last one found none.
        """
        if self._thread is not None:
            self._library.call("hillinfer_launches_wait", self._thread)

    def close(self) -> None:
        """End the thread, and what is under way before; harmless when done twice."""
        self._thread = None
        self._end()


def _close(close: Callable[[int], None], thread: int, held: list[object]) -> None:
    close(thread)
    held.clear()


# --- Queries and launches ---


@dataclass(frozen=True)
class LaunchQueries:
    """A query as segments of a launch see it.

    Parameters
    ----------
    codes
        int8 of shape (segments, H', padded head_dim).
    exponents
        int32 of shape (segments, H').
    addends
        int32 of shape (segments, H'): the mean corrections less the offsets (contract, section 10).
    """

    codes: NDArray[np.int8]
    exponents: NDArray[np.int32]
    addends: NDArray[np.int32]


@dataclass(frozen=True)
class Piece:
    """The first tokens of one segment.

    Parameters
    ----------
    query
        Index into `LaunchQueries`.
    shadow
        uint8 (beats, 64): the segment's.
    position
        Of its first token.
    """

    query: int
    shadow: NDArray[np.uint8]
    tokens: int
    position: int


class NativePieces:
    """Does a launch's work on the host with the native library; calls share nothing.

    Attributes
    ----------
    sets
        Selected sets: 1, or one per KV head.

    Raises
    ------
    NativeError
        The library is missing.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self.spec = spec
        self.scope = scope
        self._library = native_library()
        self._variant = self._library.variants[0]
        self._number = self._variant.number
        self._shape = Shape.of(spec, scope)
        self.sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._addresses = Addresses()

    def start(
        self,
        scaled: torch.Tensor,
        described: array[int],
        threads: int,
        coming: int = 0,
    ) -> tuple[LaunchQueries, NDArray[np.int32]]:
        """Code a query for all segments of a sequence and join it with the offsets.

        Parameters
        ----------
        scaled
            From `NativeScorer.scaled`, float32 (kv_heads, G or 1, head_dim).
        described
            Five words of each segment, in order, from `SegmentWords`; one whose shadow the host has
            not is full and holds none of the recent tokens.
        coming
            As for `Scorer.tuples`.

        Returns
        -------
        The query, and the offsets alone: int32, B of each scored head or A of each set.
        """
        spec = self.spec
        heads = (len(described) // SEGMENT_WORDS, spec.scored_heads)
        codes = np.empty((*heads, spec.padded_head_dim), dtype=np.int8)
        exponents = np.empty(heads, dtype=np.int32)
        corrections = np.empty(heads, dtype=np.int32)
        offsets = np.empty(offset_count(spec, self.scope), dtype=np.int32)
        scaled = scaled.contiguous()
        self._library.call(
            "hillinfer_start",
            self._number,
            self._sequence(scaled.data_ptr(), described, threads, coming),
            *(one.ctypes.data for one in (codes, exponents, corrections, offsets)),
        )
        addends = corrections.astype(np.int64)
        if spec.rule is Rule.RAW_SUM and self.scope is Scope.LAYER:
            # A is subtracted once from a sum over all heads: head 0 carries it.
            addends[:, 0] -= offsets[0]
        else:
            addends -= offsets
        return LaunchQueries(codes, exponents, addends.astype(np.int32)), offsets

    def log_weights(
        self, scaled: torch.Tensor, described: array[int], threads: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return L' of a segment whose shadow is here for now (contract, section 5).

        Parameters
        ----------
        scaled, threads
            As for `start`.
        described
            The segment's five words.

        Returns
        -------
        int32 of shape (groups, scored heads, 64), and uint8 of shape (groups, kv_heads, 64): the
        tokens' exponents.
        """
        groups = -(-described[-1] // GROUP_TOKENS)
        weights = np.empty((groups, self.spec.scored_heads, GROUP_TOKENS), dtype=np.int32)
        exponents = np.empty((groups, self.spec.kv_heads, GROUP_TOKENS), dtype=np.uint8)
        scaled = scaled.contiguous()
        self._library.call(
            "hillinfer_log_weights",
            self._number,
            self._sequence(scaled.data_ptr(), None, threads),
            described.buffer_info()[0],
            weights.ctypes.data,
            exponents.ctypes.data,
        )
        return weights, exponents

    def finish(
        self,
        offsets: NDArray[np.int32],
        known: tuple[NDArray[np.int32], NDArray[np.uint8]],
        position: int,
        tuples: NDArray[np.uint32],
        threads: int,
    ) -> None:
        """Make tuples of consecutive tokens whose L' is known.

        Parameters
        ----------
        known
            From `log_weights`, from the group of the first token on.
        position
            Of the first token, the first of a group.
        tuples
            uint32 of shape (sets, tokens), each set's in one piece; filled.
        """
        weights, exponents = known
        self._library.call(
            "hillinfer_finish_groups",
            self._number,
            self._sequence(None, None, threads),
            offsets.ctypes.data,
            position,
            tuples.shape[1],
            weights.ctypes.data,
            exponents.ctypes.data,
            tuples.ctypes.data,
            tuples.strides[0] // tuples.itemsize,
        )

    def fill(
        self,
        queries: LaunchQueries,
        wanted: Sequence[tuple[int, int, int, int]],
        tuples: NDArray[np.uint32],
        threads: int,
    ) -> None:
        """Score tokens into their places among those of a whole sequence.

        Parameters
        ----------
        queries
            Contiguous arrays.
        wanted
            Of each piece the index into `queries`, the address of its first group, the position of
            its first token, the first of that group, and its tokens.
        tuples
            uint32 of shape (sets, N), contiguous.
        """
        places = [position for _, _, position, _ in wanted]
        described = self._described(queries, wanted, places, tuples)
        self._library.call(
            "hillinfer_score_pieces",
            self._number,
            self._sequence(None, None, threads),
            described.buffer_info()[0],
            len(described) // PIECE_WORDS,
        )

    def begin(
        self, queries: LaunchQueries, pieces: Sequence[Piece], thread: LaunchThread
    ) -> Callable[[], list[NDArray[np.uint32]]]:
        """Let another thread score pieces; return what waits for it and returns their tuples.

        Parameters
        ----------
        queries, pieces
            Contiguous arrays; nobody may write to what they hold until the thread is done.
        """
        starts = [0, *accumulate(piece.tokens for piece in pieces)]
        tuples = np.empty((self.sets, starts[-1]), dtype=np.uint32)
        wanted = [
            (one.query, self._addresses.of(one.shadow), one.position, one.tokens) for one in pieces
        ]
        described = self._described(queries, wanted, starts, tuples)
        held = queries, list(pieces), described, tuples
        sequence = self._sequence(None, None, 1)
        thread.begin(self._variant, sequence, described.buffer_info()[0], len(pieces), held)

        def wait() -> list[NDArray[np.uint32]]:
            thread.wait()
            return [tuples[:, first:stop] for first, stop in pairwise(starts)]

        return wait

    def _described(
        self,
        queries: LaunchQueries,
        wanted: Sequence[tuple[int, int, int, int]],
        places: Sequence[int],
        tuples: NDArray[np.uint32],
    ) -> array[int]:
        """Return the words of pieces as `fill` wants them, and where in each set tuples begin."""
        codes, exponents = queries.codes.ctypes.data, queries.exponents.ctypes.data
        addends, out = queries.addends.ctypes.data, tuples.ctypes.data
        heads, total = self.spec.scored_heads, tuples.shape[1]
        words: list[int] = []
        for (query, address, position, tokens), place in zip(wanted, places, strict=False):
            words += (
                address,
                codes + query * heads * self.spec.padded_head_dim,
                exponents + 4 * query * heads,
                addends + 4 * query * heads,
                position,
                tokens,
                out + 4 * place,
                total,
            )
        return array("q", words)

    def _sequence(
        self, scaled: int | None, segments: array[int] | None, threads: int, coming: int = 0
    ) -> object:
        described = NativeSequence(
            self._shape,
            scaled,
            None if segments is None else segments.buffer_info()[0],
            0 if segments is None else len(segments) // SEGMENT_WORDS,
            threads,
            coming,
        )
        return ctypes.byref(described)
