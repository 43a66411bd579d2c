# SPDX-License-Identifier: Apache-2.0
"""Value codes on the host's processor, in C++ (contract, section 14)."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.native.library import NativeError, Variant, native_library
from hillinfer.native.structures import Sequence as NativeSequence
from hillinfer.native.structures import Shape
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.value_layout import code_row_bytes, value_segment_beats


class NativeValueCoder:
    """Writes value codes where value shadows and single tokens hold them.

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
        self.variant = variant or self._library.variants[0]
        if self.variant not in self._library.variants:
            raise NativeError(f"this processor has no {self.variant}")
        self._number = self.variant.number
        self._shape = Shape.of(spec, Scope.LAYER)
        self.row_bytes = code_row_bytes(spec) + spec.kv_heads

    def encode(
        self,
        values: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Code consecutive tokens into a segment's value shadow (contract, section 14).

        Parameters
        ----------
        values
            float16 of shape (tokens, kv_heads, head_dim), strided as it may be.
        statistics
            Of the segment's values.
        shadow
            uint8 of shape (value_segment_beats, 64); fresh ones are all zero.
        first_token
            Index of the first token within the segment.

        Raises
        ------
        ValueError
            Where a type or shape does not fit, or tokens lie outside the segment.
        """
        self._check(values, statistics)
        beats = value_segment_beats(self.spec), BEAT_BYTES
        if shadow.shape != beats or shadow.dtype != np.uint8 or not shadow.flags.c_contiguous:
            raise ValueError(f"a value shadow of {shadow.dtype} {shadow.shape}, not uint8 {beats}")
        last = first_token + values.shape[0]
        if first_token < 0 or last > self.spec.segment_tokens:
            raise ValueError(
                f"tokens {first_token}..{last} lie outside a segment of {self.spec.segment_tokens}"
            )
        self._call("hillinfer_encode_values", values, statistics, shadow, first_token)

    def encode_rows(
        self, values: torch.Tensor, statistics: ChannelStatistics, rows: NDArray[np.uint8]
    ) -> None:
        """Code tokens into rows of their own: each a code row, then the kv exponents.

        Parameters
        ----------
        values, statistics
            As for `encode`, whose errors it raises.
        rows
            uint8 of shape (tokens, at least row_bytes), C-contiguous.
        """
        self._check(values, statistics)
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
        self._call("hillinfer_encode_value_rows", values, statistics, rows, rows.shape[1])

    def _call(
        self,
        name: str,
        values: torch.Tensor,
        statistics: ChannelStatistics,
        out: NDArray[np.uint8],
        place: int,
    ) -> None:
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

    def _check(self, values: torch.Tensor, statistics: ChannelStatistics) -> None:
        shape = self.spec.kv_heads, self.spec.head_dim
        if values.dtype != torch.float16 or values.ndim != 3 or values.shape[1:] != shape:
            raise ValueError(
                f"values are float16 of shape (tokens, {shape[0]}, {shape[1]}), not {values.dtype} "
                f"of shape {tuple(values.shape)}"
            )
        if statistics.means.shape != shape:
            raise ValueError(f"statistics of shape {statistics.means.shape}, not {shape}")
