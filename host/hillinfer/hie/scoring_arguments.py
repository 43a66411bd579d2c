# SPDX-License-Identifier: Apache-2.0
"""What scoring and coding can be given: keys, queries, segments and their shadows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.query_codes import LOG2_E
from hillinfer_model.statistics import DEFAULT_EXPONENT, LEAST_TOKENS, SINK_TOKENS


class ScoringArguments:
    """Refuses arguments of another shape, type or order than a spec's.

    Parameters
    ----------
    spec
        Shape and key mode.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._layout = ShadowLayout(spec)
        self._query_shape = spec.query_heads, spec.head_dim
        self._key_shape = spec.kv_heads, spec.head_dim

    def check(self, query: torch.Tensor, segments: Sequence[SegmentShadow]) -> None:
        """Raise ValueError where a query or segments cannot be scored."""
        self.check_query(query)
        self.check_segments(segments)
        for segment in segments:
            self.check_arrays(segment)

    def check_query(self, query: torch.Tensor) -> None:
        """Raise ValueError where a query is of another shape or type."""
        if query.dtype != torch.float32 or query.shape != self._query_shape:
            raise ValueError(
                f"a query is float32 of shape {self._query_shape}, not "
                f"{query.dtype} of shape {tuple(query.shape)}"
            )

    def check_segments(self, segments: Sequence[SegmentShadow], first: int = 0) -> None:
        """Raise ValueError where segments from number `first` on do not follow on each other."""
        length = self._spec.segment_tokens
        for index, segment in enumerate(segments[first:], first):
            if segment.base_position != index * length:
                raise ValueError(
                    f"segment {index} starts at position {segment.base_position}, not "
                    f"{index * length}"
                )
            least = 0 if index == len(segments) - 1 else length
            if not least <= segment.tokens <= length:
                raise ValueError(
                    f"segment {index} of {len(segments)} has {segment.tokens} tokens, not "
                    f"{least}..{length}"
                )

    def check_arrays(self, segment: SegmentShadow) -> None:
        """Raise ValueError where a segment's arrays are of another shape or type."""
        # Looking at a shadow on the drive would read it.
        if not segment.on_drive:
            self._layout.check(segment.shadow)
        self._check_statistics(segment.statistics)

    def check_keys(self, keys: torch.Tensor) -> None:
        """Raise ValueError where keys are of another shape or type."""
        shape = self._key_shape
        if keys.dtype != torch.float16 or keys.ndim != 3 or keys.shape[1:] != shape:
            raise ValueError(
                f"keys are float16 of shape (tokens, {shape[0]}, {shape[1]}), not {keys.dtype} of "
                f"shape {tuple(keys.shape)}"
            )

    def check_encoding(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Raise ValueError where keys cannot be coded into a shadow; see `Scorer.encode`."""
        self.check_keys(keys)
        self._check_statistics(statistics)
        self._layout.check(shadow)
        if first_token < 0 or first_token + keys.shape[0] > self._spec.segment_tokens:
            raise ValueError(
                f"tokens {first_token}..{first_token + keys.shape[0]} lie outside a segment of "
                f"{self._spec.segment_tokens}"
            )

    def _check_statistics(self, statistics: ChannelStatistics) -> None:
        if statistics.means.shape != self._key_shape:
            raise ValueError(
                f"channel statistics have shape {self._key_shape}, not {statistics.means.shape}"
            )


def statistics_tokens(
    spec: KernelSpec,
    keys: torch.Tensor,
    first_position: int,
    preceding: ChannelStatistics | None,
) -> torch.Tensor | ChannelStatistics:
    """Return the tokens that a segment's own statistics come from, or what takes their place.

    Parameters
    ----------
    spec
        Gives the segment length.
    keys
        float16 of shape (tokens, kv_heads, head_dim): the segment's tokens so far.
    first_position
        Logical position of the first of them.
    preceding
        Statistics of the segment before; None for the first segment.

    Returns
    -------
    float16 of shape (tokens, kv_heads, head_dim) without the sinks, or where they are too few
    `preceding` itself or the contract's default (contract, section 2).

    Raises
    ------
    ValueError
        The tokens do not lie in one segment, the first segment is given a preceding one, or a
        later one with too few tokens is not.
    """
    if first_position < 0 or (
        first_position % spec.segment_tokens + keys.shape[0] > spec.segment_tokens
    ):
        raise ValueError(
            f"{keys.shape[0]} tokens from position {first_position} on do not lie in one segment "
            f"of {spec.segment_tokens}"
        )
    if first_position < spec.segment_tokens and preceding is not None:
        raise ValueError("the first segment was given the statistics of a preceding one")
    own = keys[max(SINK_TOKENS - first_position, 0) :]
    tokens = own.shape[0]
    if first_position >= spec.segment_tokens:
        if tokens < spec.segment_tokens // 2:
            if preceding is None:
                raise ValueError(
                    f"{tokens} tokens from position {first_position} on are too few for their own "
                    f"channel statistics, and those of the preceding segment are missing"
                )
            return preceding
    elif tokens < LEAST_TOKENS:
        shape = tuple(keys.shape[1:])
        return ChannelStatistics(
            np.full(shape, DEFAULT_EXPONENT, dtype=np.int8), np.zeros(shape, dtype=np.int32)
        )
    return own


def query_factor(scaling: float) -> float:
    """Return what a query is multiplied with, float64; it is rounded to float32 before.

    Parameters
    ----------
    scaling
        What the attention function multiplies inner products with.
    """
    return scaling * LOG2_E
