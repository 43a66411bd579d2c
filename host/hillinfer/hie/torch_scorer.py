# SPDX-License-Identifier: Apache-2.0
"""The scoring contract on the host CPU, in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie import scratch
from hillinfer.hie.channel_statistics import take_statistics
from hillinfer.hie.key_buffers import KeyBufferPool
from hillinfer.hie.key_coding import code_keys
from hillinfer.hie.query_coding import scale_query
from hillinfer.hie.score_stream import ScoreStream
from hillinfer.hie.sequence_log_weights import sequence_log_weights
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_block import ScoreBlock


class TorchScorer:
    """Makes and scores key shadows in host memory (HillInfer section 4.2; contract, 2 to 6).

    Results are the same bits for any number of threads: whatever is added up in an order that
    threads decide is an integer that the type holds exactly. Calls share nothing, so several
    threads may use one scorer.

    Parameters
    ----------
    spec
        Shape, key mode and rule. Key mode `fp16` keeps a shadow of the INT8 codes that the
        kernel would make on the fly.
    scope
        What shares one selected set.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self.spec = spec
        self.scope = scope
        self._layout = ShadowLayout(spec)
        self._buffers = KeyBufferPool(spec)
        self._query_shape = spec.query_heads, spec.head_dim

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics, once (contract, section 2).

        Parameters
        ----------
        keys
            float16 of shape (tokens, kv_heads, head_dim) on the CPU: the segment's tokens so far.
        first_position
            Logical position of the first of them; the sinks (positions 0..3) are left out.
        preceding
            Statistics of the segment before, None for the first.

        Raises
        ------
        ValueError
            Keys of another shape or type, or `preceding` missing where it is needed.
        """
        self.check_keys(keys)
        return take_statistics(
            self.spec, keys.detach(), first_position, preceding, scratch.coding_tokens(self.spec)
        )

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write the codes and exponents of `keys` into a segment's shadow, in place.

        Parameters
        ----------
        keys
            float16 of shape (tokens, kv_heads, head_dim) on the CPU.
        statistics
            The segment's.
        shadow
            uint8 of shape (segment_beats, 64); the rest of it stays as it is.
        first_token
            Index of the first of `keys` within the segment.

        Raises
        ------
        ValueError
            Keys, statistics or shadow of another shape or type, or tokens outside the segment.
        """
        self.check_encoding(keys, statistics, shadow, first_token)
        step = scratch.coding_tokens(self.spec)
        for start in range(0, keys.shape[0], step):
            codes, exponents = code_keys(
                keys.detach()[start : start + step], statistics, self._layout.code_bits
            )
            self._layout.write(shadow, first_token + start, codes, exponents)

    def check_encoding(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Raise ValueError where `encode` cannot take these arguments."""
        self.check_keys(keys)
        self._check_statistics(statistics)
        self._layout.check(shadow)
        if first_token < 0 or first_token + keys.shape[0] > self.spec.segment_tokens:
            raise ValueError(
                f"tokens {first_token}..{first_token + keys.shape[0]} lie outside a segment of "
                f"{self.spec.segment_tokens}"
            )

    def score(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments and yield score blocks as they are ready.

        The offsets need L' of tokens all over the sequence, so all of L' is made before the first
        block; then blocks come in position order, for each of them one per KV head in scope
        `kv_head`.

        Parameters
        ----------
        query
            float32 of shape (query_heads, head_dim) on the CPU, after rotary embedding.
        scaling
            What the attention function multiplies inner products with.
        segments
            All segments of the sequence; their tokens together are N, this step's own included.
        coming
            Tokens that N counts and that have no key yet (contract, section 3): 1 where the query
            is a predicted one.

        Returns
        -------
        Iterator[ScoreBlock]
            The tuples of a block are a view of one array that this call made.

        Raises
        ------
        NonFiniteQueryError
            At the call, where the query holds an infinity or a NaN, or becomes one when scaled.
        ValueError
            At the call, where query or segments have another shape or type, or do not follow on
            each other.
        """
        self.check(query, segments)
        scaled = scale_query(self.spec, query, scaling)
        return self._blocks(scaled, segments, coming)

    def check(self, query: torch.Tensor, segments: Sequence[SegmentShadow]) -> None:
        """Raise ValueError where `score` cannot take these arguments."""
        self.check_order(query, segments)
        for segment in segments:
            self.check_arrays(segment)

    def check_order(self, query: torch.Tensor, segments: Sequence[SegmentShadow]) -> None:
        """Raise ValueError where a query, or how segments follow on each other, is wrong."""
        self.check_query(query)
        self.check_segments(segments)

    def check_query(self, query: torch.Tensor) -> None:
        """Raise ValueError where a query is of another shape or type."""
        if query.dtype != torch.float32 or query.shape != self._query_shape:
            raise ValueError(
                f"a query is float32 of shape {self._query_shape}, not "
                f"{query.dtype} of shape {tuple(query.shape)}"
            )

    def _blocks(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], coming: int
    ) -> Iterator[ScoreBlock]:
        if segments and segments[0].tokens:
            buffers = self._buffers.take()
            weights, invalid = sequence_log_weights(self._layout, scaled, segments, buffers)
            self._buffers.give_back(buffers)
            yield from ScoreStream(self.spec, self.scope, weights, invalid, coming)

    def check_keys(self, keys: torch.Tensor) -> None:
        """Raise ValueError where keys are of another shape or type."""
        shape = (self.spec.kv_heads, self.spec.head_dim)
        if keys.dtype != torch.float16 or keys.ndim != 3 or keys.shape[1:] != shape:
            raise ValueError(
                f"keys are float16 of shape (tokens, {shape[0]}, {shape[1]}), not {keys.dtype} of "
                f"shape {tuple(keys.shape)}"
            )

    def _check_statistics(self, statistics: ChannelStatistics) -> None:
        shape = (self.spec.kv_heads, self.spec.head_dim)
        if statistics.means.shape != shape:
            raise ValueError(f"channel statistics have shape {shape}, not {statistics.means.shape}")

    def check_arrays(self, segment: SegmentShadow) -> None:
        """Raise ValueError where a segment's arrays are of another shape or type."""
        # Looking at a shadow on the drive would read it.
        if not segment.on_drive:
            self._layout.check(segment.shadow)
        self._check_statistics(segment.statistics)

    def check_segments(self, segments: Sequence[SegmentShadow], first: int = 0) -> None:
        """Raise ValueError where segments from number `first` on do not follow on each other."""
        length = self.spec.segment_tokens
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
