# SPDX-License-Identifier: Apache-2.0
"""The scoring contract on the host CPU, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.opening import sorted_top
from hillinfer.scoring.arguments import ScoringArguments
from hillinfer.scoring.scorer import SegmentShadow, Wanted, total_tokens
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from twins.key_path import TwinLayout, code_keys, take_statistics
from twins.log_weights import USUAL, KeyBufferPool, Pieces, sequence_log_weights
from twins.query_path import scale_query
from twins.score_path import sequence_tuples


class TorchScorer:
    """Makes and scores key shadows in host memory (HillInfer 4.2; contract, sections 2 to 6).

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
    pieces
        How much is done at once; bits do not depend on it.
    """

    on_device = None

    def __init__(self, spec: KernelSpec, scope: Scope, pieces: Pieces = USUAL) -> None:
        self.spec = spec
        self.scope = scope
        self._layout = TwinLayout(spec)
        self._pieces, self._buffers = pieces, KeyBufferPool(spec, pieces)
        self._arguments = ScoringArguments(spec)

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics, once (contract, section 3).

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
        self._arguments.check_keys(keys)
        return take_statistics(
            self.spec,
            keys.detach(),
            first_position,
            preceding,
            self._pieces.coding_tokens(self.spec),
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
        self._arguments.check_encoding(keys, statistics, shadow, first_token)
        step = self._pieces.coding_tokens(self.spec)
        for start in range(0, keys.shape[0], step):
            codes, exponents = code_keys(
                keys.detach()[start : start + step], statistics, self._layout.code_bits
            )
            self._layout.write(shadow, first_token + start, codes, exponents)

    def tuples(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> NDArray[np.uint32]:
        """Return the tuples of every token of consecutive segments; see `Scorer`.

        The offsets need L' of tokens all over the sequence, so all of L' is made before.

        Raises
        ------
        NonFiniteQueryError
            Where the query holds an infinity or a NaN, or becomes one when scaled.
        ValueError
            Where query or segments have another shape or type, or do not follow on each other.
        """
        self._arguments.check_query(query)
        self._arguments.check_segments(segments)
        for segment in segments:
            self._arguments.check_arrays(segment)
        scaled = scale_query(self.spec, query, scaling)
        if not total_tokens(segments):
            sets = 1 if self.scope is Scope.LAYER else self.spec.kv_heads
            return np.empty((sets, 0), np.uint32)
        buffers = self._buffers.take()
        weights, invalid = sequence_log_weights(self._layout, scaled, segments, buffers)
        self._buffers.give_back(buffers)
        return sequence_tuples(self.spec, self.scope, weights, invalid, coming, self._pieces)

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Sequence[Wanted],
    ) -> list[list[NDArray[np.int64]]]:
        """Return the selected sets of each size, by a sort of all tokens; see `Scorer`."""
        tuples = self.tuples(query, scaling, segments, coming)
        return [sorted_top(tuples, one, coming) for one in wanted]

    @property
    def table_variant(self):
        """None: the library does not choose over its tables as this does."""
        return None
