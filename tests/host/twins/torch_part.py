# SPDX-License-Identifier: Apache-2.0
"""The host's part of a sequence, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.scoring.scorer import SegmentShadow
from hillinfer_model.beats import Beats
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.offsets import RECENT_TOKENS
from hillinfer_model.query_block import make_query_block
from hillinfer_model.query_codes import QueryCodes
from twins.key_path import TwinLayout
from twins.log_weights import KeyBufferPool, group_log_weights
from twins.query_path import code_query, sequence_offsets
from twins.score_path import TokenTuples


class TorchPart:
    """A `NativePart` that takes L' of all its tokens before anything is launched.

    A shadow on the drive is read once this way, in the order in which it comes.

    Parameters
    ----------
    spec, scope
        Shape and rule; what shares one selected set.
    """

    def __init__(self, spec: KernelSpec, scope: Scope) -> None:
        self.spec = spec
        self.scope = scope
        self.layout = TwinLayout(spec)
        self.buffers = KeyBufferPool(spec)

    def start(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], coming: int = 0
    ) -> _Started:
        """Take L' of R ∪ Φ and of what only the host has; see `NativePart`."""
        return _Started(self, scaled, segments, coming)


class _Started:
    def __init__(
        self,
        part: TorchPart,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        coming: int,
    ) -> None:
        self._part = part
        self._scaled = scaled
        self._segments = segments
        self._buffers = part.buffers.take()
        tokens = segments[-1].base_position + segments[-1].tokens
        # L' where it is known, and which tokens are invalid.
        self._weights = torch.zeros((*scaled.shape[:2], tokens), dtype=torch.int32)
        self._invalid = torch.zeros((part.spec.kv_heads, tokens), dtype=torch.bool)
        for segment in segments:
            own = range(segment.device_tokens, segment.tokens)
            self._weigh_groups(segment, own)
            if segment.device_tokens:
                self._weigh_probes(segment, own.start)
            recent = max(tokens + coming - RECENT_TOKENS - segment.base_position, 0)
            self._weigh_groups(segment, range(recent, own.start))
        self._offsets = sequence_offsets(
            part.spec, part.scope, self._weights, self._invalid, coming
        )
        self._tuples = TokenTuples(part.spec, part.scope, self._offsets)

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return query blocks; see `StartedScoring`."""
        spec = self._part.spec
        coded = code_query(self._scaled, [self._segments[number].statistics for number in numbers])
        heads = (len(numbers), spec.scored_heads)
        codes = coded.codes.numpy().astype(np.int8).reshape(*heads, -1)
        exponents = coded.exponents.numpy().astype(np.int8).reshape(heads)
        corrections = coded.offsets.numpy().astype(np.int32).reshape(heads)
        own = self._offsets.numpy().astype(np.int64).reshape(-1)
        blocks = [
            make_query_block(QueryCodes(*parts), own, spec, self._part.scope).pack(spec)
            for parts in zip(codes, exponents, corrections, strict=True)
        ]
        return np.concatenate(blocks)

    def fill(self, wanted: Sequence[tuple[int, range]], tuples: NDArray[np.uint32]) -> None:
        """Score tokens into their places; see `StartedScoring`."""
        for number, tokens in wanted:
            segment = self._segments[number]
            # What a lost device was to score is not known yet.
            self._weigh_groups(
                segment, range(tokens.start, min(tokens.stop, segment.device_tokens))
            )
            first = segment.base_position + tokens.start
            place = slice(first, first + len(tokens))
            own = self._weights[..., place], self._invalid[:, place]
            tuples[:, place] = self._tuples.of(*own, first)

    def end(self) -> None:
        """Give the buffers back."""
        self._part.buffers.give_back(self._buffers)

    def _weigh_groups(self, segment: SegmentShadow, tokens: range) -> None:
        """Put L' of the groups that hold some tokens of a segment where they belong."""
        if not tokens:
            return
        groups = range(tokens.start // GROUP_TOKENS, -(-tokens.stop // GROUP_TOKENS))
        weights, invalid = group_log_weights(
            self._part.layout,
            self._scaled,
            segment.statistics,
            segment.shadow,
            groups,
            self._buffers,
        )
        first = groups.start * GROUP_TOKENS
        count = min(segment.tokens - first, weights.shape[-1])
        place = slice(segment.base_position + first, segment.base_position + first + count)
        self._weights[..., place] = weights[..., :count]
        self._invalid[:, place] = invalid[:, :count]

    def _weigh_probes(self, segment: SegmentShadow, stop: int) -> None:
        """Put L' of the probe tokens and sinks below `stop` where they belong."""
        probes = segment.probes
        weights, invalid = group_log_weights(
            self._part.layout,
            self._scaled,
            segment.statistics,
            probes.shadow,
            range(probes.groups),
            self._buffers,
        )
        kept = np.flatnonzero(probes.tokens < stop)
        places = torch.from_numpy(segment.base_position + probes.tokens[kept])
        self._weights[..., places] = weights[..., kept]
        self._invalid[:, places] = invalid[:, kept]
