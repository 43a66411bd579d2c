# SPDX-License-Identifier: Apache-2.0
"""The golden model: the whole scoring contract, from FP16 keys and a query to score blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.integers import Integers
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.key_codes import KeyCodes, encode_keys
from hillinfer_model.offsets import offsets
from hillinfer_model.query_codes import encode_scaled_query, scale_query
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.score_tuples import cut_blocks
from hillinfer_model.scores import aligned_products, score_codes
from hillinfer_model.statistics import segment_statistics


class GoldenModel:
    """What every execution of the scoring contract must equal, bit for bit.

    Parameters
    ----------
    spec
        Shape, key mode, rule, segment and block length.
    scope
        What shares one selected set.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self.spec = spec
        self.scope = scope

    def statistics(
        self, keys: NDArray[np.uint16], first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics (contract, section 3); see `segment_statistics`."""
        return segment_statistics(keys, first_position, self.spec.segment_tokens, preceding)

    def encode(self, keys: NDArray[np.uint16], statistics: ChannelStatistics) -> KeyCodes:
        """Code keys of one segment (contract, section 3); see `encode_keys`."""
        return encode_keys(keys, statistics, self.spec.key_mode)

    def encode_sequence(self, keys: NDArray[np.uint16]) -> list[CodedSegment]:
        """Code a sequence whose segments are all first scored now (contract, section 3).

        Parameters
        ----------
        keys
            uint16 of shape (N, kv_heads, head_dim), FP16 codes from position 0.
        """
        segments: list[CodedSegment] = []
        for base in range(0, keys.shape[0], self.spec.segment_tokens):
            own = keys[base : base + self.spec.segment_tokens]
            preceding = segments[-1].statistics if segments else None
            statistics = self.statistics(own, base, preceding)
            segments.append(CodedSegment(base, self.encode(own, statistics), statistics))
        return segments

    def aligned(
        self, query: NDArray[np.float32], scaling: float, segments: Sequence[CodedSegment]
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the aligned products of every token (contract, sections 4 and 5).

        Parameters
        ----------
        query
            float32 of shape (query_heads, head_dim).
        scaling
            What the attention function multiplies inner products with.
        segments
            Consecutive, from position 0; only the last may be short.

        Returns
        -------
        aligned
            L', int64 of shape (H', N).
        invalid
            bool of shape (N, kv_heads).

        Raises
        ------
        NonFiniteQueryError
            Where the query holds an infinity or a NaN, or becomes one when summed or scaled.
        ValueError
            Where a shape does not fit the spec or the segments are not consecutive.
        """
        scaled = scale_query(query, scaling, self.spec)
        self._check_consecutive(segments)
        aligned = [np.zeros((self.spec.scored_heads, 0), dtype=np.int64)]
        invalid = [np.zeros((0, self.spec.kv_heads), dtype=np.bool_)]
        for segment in segments:
            codes = encode_scaled_query(scaled, segment.statistics, self.spec)
            aligned.append(aligned_products(codes, segment.codes, self.spec))
            invalid.append(segment.codes.invalid)
        return np.concatenate(aligned, axis=1), np.concatenate(invalid)

    def score(
        self,
        query: NDArray[np.float32],
        scaling: float,
        segments: Sequence[CodedSegment],
        coming: int = 0,
    ) -> NDArray[np.uint16]:
        """Return the score code of every token (contract, section 7).

        Parameters and errors are those of `aligned`, and of `reference_positions` for `coming`.

        Returns
        -------
        uint16 of shape (1, N) for scope `layer`, (kv_heads, N) for `kv_head`.
        """
        aligned, invalid = self.aligned(query, scaling, segments)
        references = offsets(aligned, invalid, self.spec, self.scope, coming)
        return score_codes(aligned, references, invalid, self.spec, self.scope)

    def score_blocks(
        self,
        query: NDArray[np.float32],
        scaling: float,
        segments: Sequence[CodedSegment],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Return the score blocks of every token (contract, section 11).

        Parameters and errors are those of `score`; errors come before the first block.
        """
        return cut_blocks(self.score(query, scaling, segments, coming), self.spec.block_tokens)

    def _check_consecutive(self, segments: Sequence[CodedSegment]) -> None:
        for index, segment in enumerate(segments):
            base = index * self.spec.segment_tokens
            if segment.base_position != base:
                raise ValueError(
                    f"segment {index} starts at position {segment.base_position}, not {base}"
                )
            tokens = segment.codes.codes.shape[0]
            is_last = index == len(segments) - 1
            if tokens > self.spec.segment_tokens or (
                tokens < self.spec.segment_tokens and not is_last
            ):
                raise ValueError(
                    f"segment {index} of {len(segments)} holds {tokens} tokens; only the last may "
                    f"hold other than {self.spec.segment_tokens}, and not more"
                )
