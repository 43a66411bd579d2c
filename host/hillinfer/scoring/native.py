# SPDX-License-Identifier: Apache-2.0
"""The scoring contract on the host's processor, in C++."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import Variant, native_library
from hillinfer.native.structures import SEGMENT_WORDS, Choice, Quota, Shape
from hillinfer.native.structures import Sequence as NativeSequence
from hillinfer.scoring.arguments import (
    ScoringArguments,
    SegmentWords,
    query_factor,
    statistics_tokens,
)
from hillinfer.scoring.scorer import SegmentShadow, Wanted, total_tokens
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# --- The exact top of tuples ---


def native_top(
    tuples: NDArray[np.uint32], wanted: Wanted, coming: int = 0
) -> list[NDArray[np.int64]]:
    """Return the selected sets: the kept positions and the best others (contract, section 8).

    Parameters
    ----------
    tuples
        uint32 of shape (sets, N): those of positions 0 .. N-1 in order.
    wanted
        Of N and what is coming.
    coming
        As for `Scorer.tuples`; what is coming is the last of each set.

    Returns
    -------
    One ascending int64 array of positions per set.

    Raises
    ------
    ValueError
        Another type or order, more is wanted than there is, or less than is kept.
    """
    if tuples.dtype != np.uint32 or tuples.ndim != 2:
        raise ValueError("tuples are uint32, those of one set behind the other's")
    sets, tokens = tuples.shape
    wanted.check(tokens + coming, coming)
    tuples = np.ascontiguousarray(tuples)
    chosen = np.empty((sets, wanted.count), dtype=np.int64)
    quota = Quota(coming, wanted.sinks, wanted.recent, wanted.count)
    native_library().call(
        "hillinfer_select",
        tuples.ctypes.data,
        sets,
        tokens,
        ctypes.byref(quota),
        torch.get_num_threads(),
        chosen.ctypes.data,
    )
    return list(chosen)


# --- The scorer ---

_NOTHING = Wanted(0, 0, 0)


class NativeScorer:
    """Makes and scores key shadows in host memory, natively (contract, sections 2 to 9).

    A shadow is read where it lies, once, and only tuples are written; the offset tokens are scored
    first. A shadow on the drive is there for a moment only, so its L' waits in memory instead.
    Results are the same bits for any variant and any number of threads; calls share nothing.

    Parameters
    ----------
    spec
        Shape, key mode and rule. Key mode `fp16` keeps a shadow of the INT8 codes that the
        kernel would make on the fly.
    variant
        Instructions to use; None for the best that this processor has.

    Raises
    ------
    NativeError
        The library is missing, or the processor cannot run the variant.
    """

    # No device scores any of it.
    on_device = None

    def __init__(self, spec: KernelSpec, scope: Scope, variant: Variant | None = None) -> None:
        self.spec = spec
        self.scope = scope
        self._library = native_library()
        self.variant = self._library.runnable(variant)
        # Asking an enumeration takes longer than coding a token.
        self._number = self.variant.number
        self._shape = Shape.of(spec, scope)
        self._sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._bares: dict[int, object] = {}
        self._arguments = ScoringArguments(spec)
        self._words = SegmentWords(spec.segment_tokens, self._arguments.check_arrays)

    @property
    def table_variant(self) -> Variant | None:
        """Its own."""
        return self.variant

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics (contract, section 3); see `Scorer`."""
        self._arguments.check_keys(keys)
        own = statistics_tokens(self.spec, keys.detach(), first_position, preceding)
        if isinstance(own, ChannelStatistics):
            return own
        shape = (self.spec.kv_heads, self.spec.head_dim)
        taken = ChannelStatistics(np.empty(shape, np.int8), np.empty(shape, np.int32))
        self._library.call(
            "hillinfer_statistics",
            self._number,
            self._sequence(None, None),
            own.data_ptr(),
            *own.stride(),
            own.shape[0],
            taken.exponents.ctypes.data,
            taken.means.ctypes.data,
        )
        return taken

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write codes and exponents into a shadow (contract, sections 3, 9); see `Scorer`."""
        self._arguments.check_encoding(keys, statistics, shadow, first_token)
        kept: list[NDArray[Any]] = []
        address, words = self._words.coded(shadow, statistics, kept)
        segment, tokens = array("q", words), keys.shape[0]
        # A token is coded in less time than it takes to get Python's lock back.
        call = self._library.call_holding if tokens == 1 else self._library.call
        call(
            "hillinfer_encode",
            self._number,
            self._bare(),
            segment.buffer_info()[0],
            keys.data_ptr(),
            *keys.stride(),
            address,
            first_token,
            tokens,
        )

    def check(self, query: torch.Tensor, segments: Sequence[SegmentShadow]) -> None:
        """Raise ValueError as `tuples` does, but for arrays, which are checked once described."""
        self._arguments.check_query(query)
        self._arguments.check_segments(segments)

    def tuples(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> NDArray[np.uint32]:
        """Score every token of consecutive segments (sections 4 to 11); see `Scorer`."""
        self._arguments.check_query(query)
        kept: list[NDArray[Any]] = []
        described = self._described(segments, kept)
        return self._scored(described, self.scaled(query, scaling), segments, coming)

    def scaled(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Bring a query to units of log2 of the weight (contract, section 4).

        Parameters
        ----------
        query, scaling
            As for `tuples`, whose errors it raises.

        Returns
        -------
        float32 of shape (kv_heads, G or 1, head_dim).
        """
        self._arguments.check_query(query)
        spec, rows = self.spec, _rows(query)
        scaled = torch.empty(spec.kv_heads, spec.scored_heads // spec.kv_heads, spec.head_dim)
        choice = self._choice(rows, scaling, _NOTHING)
        self._library.call_holding(
            "hillinfer_scale", self._bare(), ctypes.byref(choice), scaled.data_ptr()
        )
        return scaled

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Return the selected sets: of a single size in one call of the library; see `Scorer`."""
        for one in wanted:
            one.check(total_tokens(segments) + coming, coming)
        self._arguments.check_query(query)
        kept: list[NDArray[Any]] = []
        described, rows = self._described(segments, kept), _rows(query)
        # Shadows on the drive are there one after the other, so all of them are scored first.
        if described is None or len(wanted) > 1:
            tuples = self._scored(described, self.scaled(rows, scaling), segments, coming)
            return [native_top(tuples, one, coming) for one in wanted]
        choice = self._choice(rows, scaling, wanted[0])
        chosen = np.empty((self._sets, wanted[0].count), dtype=np.int64)
        self._library.call(
            "hillinfer_choose",
            self._number,
            self._sequence(None, described, coming),
            ctypes.byref(choice),
            chosen.ctypes.data,
        )
        return [list(chosen)]

    def _described(
        self, segments: Sequence[SegmentShadow], kept: list[NDArray[Any]]
    ) -> array[int] | None:
        """Check segments; return five words of each, or None where one is on the drive."""
        full = segments[:-1]
        words = self._words.joined(full)
        if words is not None and segments:
            last = segments[-1]
            self._arguments.check_segments(segments, len(full))
            if not last.on_drive:
                return array("q", words + self._words.of(last, kept))
        self._arguments.check_segments(segments)
        if any(segment.on_drive for segment in segments):
            for segment in segments:
                self._arguments.check_arrays(segment)
            return None
        words = self._words.join(full, kept)
        return array("q", b"".join([words, *(self._words.of(one, kept) for one in segments[-1:])]))

    def _choice(self, query: torch.Tensor, scaling: float, wanted: Wanted) -> Choice:
        return Choice(
            query.data_ptr(),
            query.stride(0),
            self.spec.group_size,
            query_factor(scaling),
            wanted.sinks,
            wanted.recent,
            wanted.count,
        )

    def _scored(
        self,
        described: array[int] | None,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        coming: int,
    ) -> NDArray[np.uint32]:
        tokens = sum(segment.tokens for segment in segments)
        tuples = np.empty((self._sets, tokens), dtype=np.uint32)
        if not tokens:
            return tuples
        if described is None:
            self._score_passing(coming, scaled, segments, tuples)
            return tuples
        self._library.call(
            "hillinfer_score",
            self._number,
            self._sequence(scaled, described, coming),
            tuples.ctypes.data,
        )
        return tuples

    def _score_passing(
        self,
        coming: int,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        tuples: NDArray[np.uint32],
    ) -> None:
        """Score shadows that are asked for one after the other, each gone when the next comes."""
        groups = -(-tuples.shape[1] // GROUP_TOKENS)
        weights = np.empty((groups, self.spec.scored_heads, GROUP_TOKENS), dtype=np.int32)
        exponents = np.empty((groups, self.spec.kv_heads, GROUP_TOKENS), dtype=np.uint8)
        sequence = self._sequence(scaled, None, coming)
        for segment in segments:
            if not segment.tokens:
                continue
            first = segment.base_position // GROUP_TOKENS
            kept: list[NDArray[Any]] = []
            described = array("q", self._words.of(segment, kept))
            self._library.call(
                "hillinfer_log_weights",
                self._number,
                sequence,
                described.buffer_info()[0],
                weights[first:].ctypes.data,
                exponents[first:].ctypes.data,
            )
        self._library.call(
            "hillinfer_finish",
            self._number,
            sequence,
            tuples.shape[1],
            weights.ctypes.data,
            exponents.ctypes.data,
            tuples.ctypes.data,
        )

    def _bare(self) -> object:
        """Return a sequence of nothing but shape and threads, which no call changes."""
        threads = torch.get_num_threads()
        known = self._bares.get(threads)
        if known is None:
            known = self._bares[threads] = self._sequence(None, None)
        return known

    def _sequence(
        self, scaled: torch.Tensor | None, segments: array[int] | None, coming: int = 0
    ) -> object:
        described = NativeSequence(
            self._shape,
            None if scaled is None else scaled.data_ptr(),
            None if segments is None else segments.buffer_info()[0],
            0 if segments is None else len(segments) // SEGMENT_WORDS,
            torch.get_num_threads(),
            coming,
        )
        return ctypes.byref(described)


def _rows(query: torch.Tensor) -> torch.Tensor:
    """Return a query whose heads each lie in one piece."""
    return query if query.stride(1) == 1 else query.contiguous()
