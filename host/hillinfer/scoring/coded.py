# SPDX-License-Identifier: Apache-2.0
"""Value codes, logarithms and weights of tokens, in C++ (contract, sections 5, 14 and 16)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import Variant, native_library
from hillinfer.native.structures import SEGMENT_WORDS, Shape
from hillinfer.native.structures import Sequence as NativeSequence
from hillinfer.scoring.arguments import ScoringArguments, SegmentWords
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.value_layout import code_row_bytes

# --- Value codes ---


class NativeValueCoder:
    """Writes value codes where single tokens hold them.

    Their channel statistics are those that `NativeScorer.statistics` takes of values. Bytes are
    the same for any variant and any number of threads.

    Parameters
    ----------
    spec
        Shape; the key mode does not matter.
    variant
        Instructions to use; None for the best that this processor has.

    Attributes
    ----------
    row_bytes
        Bytes of a token that is kept by itself: its code row and an exponent of each KV head.

    Raises
    ------
    NativeError
        The library is missing, or the processor cannot run the variant.
    """

    def __init__(self, spec: KernelSpec, variant: Variant | None = None) -> None:
        self.spec = spec
        self._library = native_library()
        self.variant = self._library.runnable(variant)
        self._number = self.variant.number
        self._shape = Shape.of(spec, Scope.LAYER)
        self.row_bytes = code_row_bytes(spec) + spec.kv_heads

    def encode_rows(
        self, values: torch.Tensor, statistics: ChannelStatistics, rows: NDArray[np.uint8]
    ) -> None:
        """Code tokens into rows of their own: each a code row, then the kv exponents.

        Parameters
        ----------
        values
            float16 of shape (tokens, kv_heads, head_dim), strided as it may be.
        rows
            uint8 of shape (tokens, at least row_bytes), C-contiguous.

        Raises
        ------
        ValueError
            Where a type or shape does not fit.
        """
        self.check(values, statistics)
        tokens = values.shape[0]
        if (
            rows.dtype != np.uint8
            or rows.ndim != 2
            or not rows.flags.c_contiguous
            or len(rows) != tokens
            or rows.shape[1] < self.row_bytes
        ):
            raise ValueError(
                f"rows of {rows.dtype} {rows.shape}, not uint8 ({tokens}, {self.row_bytes} or more)"
            )
        self.call("hillinfer_encode_value_rows", values, statistics, rows, rows.shape[1])

    def call(
        self,
        name: str,
        values: torch.Tensor,
        statistics: ChannelStatistics,
        out: NDArray[np.uint8],
        place: int,
    ) -> None:
        """Have a function of the library code values to a place of an array, unchecked."""
        exponents = np.ascontiguousarray(statistics.exponents)
        means = np.ascontiguousarray(statistics.means)
        segment = array("q", (0, exponents.ctypes.data, means.ctypes.data, 0, values.shape[0]))
        sequence = NativeSequence(self._shape, None, None, 0, torch.get_num_threads(), 0)
        self._library.call(
            name,
            self._number,
            ctypes.byref(sequence),
            segment.buffer_info()[0],
            values.data_ptr(),
            *values.stride(),
            out.ctypes.data,
            place,
            values.shape[0],
        )

    def check(self, values: torch.Tensor, statistics: ChannelStatistics) -> None:
        """Raise ValueError where values or statistics are of another shape or type."""
        shape = self.spec.kv_heads, self.spec.head_dim
        if values.dtype != torch.float16 or values.ndim != 3 or values.shape[1:] != shape:
            raise ValueError(
                f"values are float16 of shape (tokens, {shape[0]}, {shape[1]}), not {values.dtype} "
                f"of shape {tuple(values.shape)}"
            )
        if statistics.means.shape != shape:
            raise ValueError(f"statistics of shape {statistics.means.shape}, not {shape}")


# --- Logarithms and weights ---


@dataclass(frozen=True)
class Weighed:
    """What key codes say of some tokens.

    Parameters
    ----------
    aligned
        L', int32 of shape (query_heads, tokens).
    invalid
        bool of shape (kv_heads, tokens): keys with a NaN.
    """

    aligned: NDArray[np.int32]
    invalid: NDArray[np.bool_]


class AlignedWeights:
    """Computes L' of coded tokens, of each query head under either rule.

    A device hands on scores and no L'. A predicted query ranks tokens, and the true one weighs
    them. So L' is computed here, whoever ranked: half a byte per channel of the groups that have
    coded tokens. Any variant and number of threads gives the same bits.

    Parameters
    ----------
    variant
        Instructions to use; None for the best that this processor has.

    Raises
    ------
    NativeError
        The library is missing, or the processor cannot run the variant.
    """

    def __init__(self, spec: KernelSpec, variant: Variant | None = None) -> None:
        self.spec = replace(spec, rule=Rule.WEIGHT_SUM)
        self._library = native_library()
        self._scorer = NativeScorer(self.spec, Scope.LAYER, variant)
        self.variant = self._scorer.variant
        self._number = self.variant.number
        self._shape = Shape.of(self.spec, Scope.LAYER)
        self._arguments = ScoringArguments(self.spec)
        self._words = SegmentWords(spec.segment_tokens, self._arguments.check_arrays)

    def scaled(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return q' (contract, section 4), float32 of shape (query_heads, head_dim).

        Parameters
        ----------
        query
            float32 of the same shape, on the CPU.

        Raises
        ------
        NonFiniteQueryError
            The query holds an infinity or a NaN.
        """
        return self._scorer.scaled(query, scaling).view(query.shape)

    def of_each(
        self,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        sets: Sequence[NDArray[np.int64]],
    ) -> list[Weighed]:
        """Return L' of the tokens of each set.

        Parameters
        ----------
        scaled
            q', as `scaled` returns it.
        segments
            Shadows of the sequence from its first segment on. One that is on the drive, or on a
            device, is read once more where any set has tokens of it: once for all sets, because
            such shadows come in their order alone.
        sets
            int64 positions of each, ascending, each coded in `segments`.

        Raises
        ------
        IndexError
            A position has no codes.
        """
        spec = self.spec
        coded = segments[-1].base_position + segments[-1].tokens if segments else 0
        for one in sets:
            if len(one) and not 0 <= int(one[0]) <= int(one[-1]) < coded:
                raise IndexError(f"positions {one[0]} to {one[-1]} of {coded} coded tokens")
        found = [
            Weighed(
                np.empty((spec.kv_heads * spec.group_size, len(one)), np.int32),
                np.empty((spec.kv_heads, len(one)), np.bool_),
            )
            for one in sets
        ]
        if not any(one.on_drive for one in segments):
            for one, of in zip(sets, found, strict=True):
                self._weigh(scaled, segments, one, of.aligned, of.invalid)
            return found
        for segment in segments:
            base = segment.base_position
            ends = [np.searchsorted(one, (base, base + segment.tokens)) for one in sets]
            if all(first == stop for first, stop in ends):
                continue
            # Asked for once; it is there until the next one's is.
            here = SegmentShadow(0, segment.tokens, segment.shadow, segment.statistics)
            for one, of, (first, stop) in zip(sets, found, ends, strict=True):
                if first == stop:
                    continue
                own = one[first:stop] - base
                part = np.empty((len(of.aligned), len(own)), np.int32)
                broken = np.empty((spec.kv_heads, len(own)), np.bool_)
                self._weigh(scaled, [here], own, part, broken)
                of.aligned[:, first:stop], of.invalid[:, first:stop] = part, broken
        return found

    def _weigh(
        self,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        positions: NDArray[np.int64],
        aligned: NDArray[np.int32],
        invalid: NDArray[np.bool_],
    ) -> None:
        kept: list[NDArray[np.uint8]] = []
        words = self._words.joined(segments[:-1])
        if words is None:
            words = self._words.join(segments[:-1], kept)
        described = array("q", words + b"".join(self._words.of(one, kept) for one in segments[-1:]))
        sequence = NativeSequence(
            self._shape,
            scaled.data_ptr(),
            described.buffer_info()[0],
            len(described) // SEGMENT_WORDS,
            torch.get_num_threads(),
            0,
        )
        self._library.call(
            "hillinfer_aligned_tokens",
            self._number,
            ctypes.byref(sequence),
            positions.ctypes.data,
            len(positions),
            aligned.ctypes.data,
            invalid.ctypes.data,
        )
