# SPDX-License-Identifier: Apache-2.0
"""Scores on a device what it holds and everything else on the host (HillInfer section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.errors import DeviceError
from hillinfer.devices.resident_shadow import ResidentShadow
from hillinfer.devices.scorer import SegmentShadow
from hillinfer.devices.scoring_device import DeviceSegment, StoredShadow
from hillinfer.hie.key_buffers import KeyBufferPool, KeyBuffers
from hillinfer.hie.offsets import RECENT_TOKENS, sequence_offsets
from hillinfer.hie.query_coding import code_query, scale_query
from hillinfer.hie.sequence_log_weights import group_log_weights
from hillinfer.hie.shadow_layout import ShadowLayout
from hillinfer.hie.token_tuples import TokenTuples
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer.storage.streamed_shadow import StreamedShadow
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer.timeline.silent import SILENT
from hillinfer_model.beats import Beats
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.query_block import make_query_block
from hillinfer_model.query_codes import QueryCodes
from hillinfer_model.score_block import ScoreBlock
from hillinfer_model.score_tuples import WINDOW_TOKENS


@dataclass(frozen=True)
class _Known:
    """L' of the tokens that the host has scored, and which tokens are invalid.

    Parameters
    ----------
    weights
        int32 of shape (kv_heads, heads, N).
    invalid
        bool of shape (kv_heads, N).
    """

    weights: torch.Tensor
    invalid: torch.Tensor


class DeviceScorer:
    """A `Scorer` whose segments lie partly on a device.

    The host scores R ∪ Φ first, because the offsets come from them (contract, section 3); the
    device is launched with the offsets and scores while the host goes on with its own tokens.
    Where the device fails, the host scores what is missing with the same offsets.

    Parameters
    ----------
    host
        Takes statistics, codes keys and scores what the device does not hold.
    shadows
        The device, and what it holds.
    recorder
        Notes how long launches take.
    """

    def __init__(
        self, host: TorchScorer, shadows: DeviceShadows, recorder: Recorder = SILENT
    ) -> None:
        self._recorder = recorder
        self.spec: KernelSpec = host.spec
        self.scope: Scope = host.scope
        self.shadows = shadows
        self._host = host
        self._layout = ShadowLayout(host.spec)
        self._buffers = KeyBufferPool(host.spec)

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics; see `Scorer`."""
        return self._host.statistics(keys, first_position, preceding)

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write codes and exponents into a segment's shadow; see `Scorer`."""
        self._host.encode(keys, statistics, shadow, first_token)

    def score(
        self, query: torch.Tensor, scaling: float, segments: Sequence[SegmentShadow]
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments; see `Scorer`.

        Blocks of different segments come in any order.
        """
        given = [one for one in segments if one.device_tokens]
        if self.shadows.lost or not given:
            return self._host.score(query, scaling, segments)
        self._host.check(query, segments)
        return self._blocks(scale_query(self.spec, query, scaling), segments, given)

    def _blocks(
        self,
        scaled: torch.Tensor,
        segments: Sequence[SegmentShadow],
        given: Sequence[SegmentShadow],
    ) -> Iterator[ScoreBlock]:
        buffers = self._buffers.take()
        tokens = segments[-1].base_position + segments[-1].tokens
        known = _Known(
            torch.zeros((*scaled.shape[:2], tokens), dtype=torch.int32),
            torch.zeros((self.spec.kv_heads, tokens), dtype=torch.bool),
        )
        on_host = [range(one.device_tokens, one.tokens) for one in segments]
        for segment, own in zip(segments, on_host, strict=True):
            self._score_groups(scaled, segment, own, known, buffers)
            if segment.device_tokens:
                self._score_probes(scaled, segment, own.start, known, buffers)
            recent = max(tokens - RECENT_TOKENS - segment.base_position, 0)
            self._score_groups(scaled, segment, range(recent, own.start), known, buffers)
        offsets = sequence_offsets(self.spec, self.scope, known.weights, known.invalid)
        tuples = TokenTuples(self.spec, self.scope, offsets)
        done = {one.base_position: 0 for one in given}
        try:
            for launch in self._launches(given):
                queries, placed = self._query_blocks(scaled, launch, offsets), self._place(launch)
                started = time.perf_counter_ns()
                scoring = self.shadows.score(self.scope, queries, placed)
                for segment, own in zip(segments, on_host, strict=False):
                    yield from self._blocks_of(segment.base_position, own, known, tuples)
                on_host = []
                for part in scoring:
                    base = launch[part.segment].base_position
                    yield from self._cut(base + part.first_token, part.tuples)
                    done[base] = part.first_token + part.tuples.shape[1]
                self._recorder.note(
                    Lane.DEVICE_SCORING,
                    "launch",
                    started,
                    time.perf_counter_ns(),
                    segments=len(placed),
                    tokens=sum(one.tokens for one in placed),
                )
        except DeviceError as error:
            self.shadows.lose(error)
            for segment, own in zip(segments, on_host, strict=False):
                yield from self._blocks_of(segment.base_position, own, known, tuples)
            for one in given:
                missing = range(done[one.base_position], one.device_tokens)
                self._score_groups(scaled, one, missing, known, buffers)
                yield from self._blocks_of(one.base_position, missing, known, tuples)
        self._buffers.give_back(buffers)

    def _launches(self, given: Sequence[SegmentShadow]) -> Iterator[list[SegmentShadow]]:
        """Yield what is scored at once: what lies on the device, then the drive's in pieces."""
        resident: list[SegmentShadow] = [one for one in given if isinstance(one, ResidentShadow)]
        if resident:
            yield resident
        streamed = [one for one in given if not isinstance(one, ResidentShadow)]
        step = max(len(self.shadows.staging), 1)
        for start in range(0, len(streamed), step):
            yield streamed[start : start + step]

    def _place(self, launch: Sequence[SegmentShadow]) -> list[DeviceSegment]:
        """Return where the segments of a launch lie, those from the drive loaded."""
        placed, stored = [], []
        staging = iter(self.shadows.staging)
        for one in launch:
            if isinstance(one, ResidentShadow):
                slot = one.slot
            else:
                assert isinstance(one, StreamedShadow)
                assert one.place is not None
                slot = next(staging)
                stored.append(StoredShadow(slot, *one.place))
            placed.append(DeviceSegment(slot, one.base_position, one.device_tokens))
        if stored:
            # All at once: their blocks are in flight together.
            with self._recorder.span(Lane.READS, "shadows to device", segments=len(stored)):
                self.shadows.load(stored)
        return placed

    def _score_groups(
        self,
        scaled: torch.Tensor,
        segment: SegmentShadow,
        tokens: range,
        known: _Known,
        buffers: KeyBuffers,
    ) -> None:
        """Put L' of the groups that hold some tokens of a segment where they belong."""
        if not tokens:
            return
        groups = range(tokens.start // GROUP_TOKENS, -(-tokens.stop // GROUP_TOKENS))
        weights, invalid = group_log_weights(
            self._layout, scaled, segment.statistics, segment.shadow, groups, buffers
        )
        first = groups.start * GROUP_TOKENS
        count = min(segment.tokens - first, weights.shape[-1])
        place = slice(segment.base_position + first, segment.base_position + first + count)
        known.weights[..., place] = weights[..., :count]
        known.invalid[:, place] = invalid[:, :count]

    def _score_probes(
        self,
        scaled: torch.Tensor,
        segment: SegmentShadow,
        stop: int,
        known: _Known,
        buffers: KeyBuffers,
    ) -> None:
        """Put L' of the probe tokens and sinks below `stop` where they belong."""
        probes = segment.probes
        weights, invalid = group_log_weights(
            self._layout,
            scaled,
            segment.statistics,
            probes.shadow,
            range(probes.groups),
            buffers,
        )
        kept = np.flatnonzero(probes.tokens < stop)
        places = torch.from_numpy(segment.base_position + probes.tokens[kept])
        known.weights[..., places] = weights[..., kept]
        known.invalid[:, places] = invalid[:, kept]

    def _query_blocks(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], offsets: torch.Tensor
    ) -> Beats:
        """Return a query block per segment, one behind the other (contract, section 6)."""
        coded = code_query(scaled, [one.statistics for one in segments])
        heads = (len(segments), self.spec.scored_heads)
        codes = coded.codes.numpy().astype(np.int8).reshape(*heads, -1)
        exponents = coded.exponents.numpy().astype(np.int8).reshape(heads)
        corrections = coded.offsets.numpy().astype(np.int32).reshape(heads)
        own = offsets.numpy().astype(np.int64).reshape(-1)
        blocks = [
            make_query_block(QueryCodes(*parts), own, self.spec, self.scope).pack(self.spec)
            for parts in zip(codes, exponents, corrections, strict=True)
        ]
        return np.concatenate(blocks)

    def _blocks_of(
        self, base_position: int, tokens: range, known: _Known, tuples: TokenTuples
    ) -> Iterator[ScoreBlock]:
        step = self.spec.block_tokens
        for start in range(tokens.start, tokens.stop, step):
            first = base_position + start
            place = slice(first, first + min(step, tokens.stop - start))
            made = tuples.of(known.weights[..., place], known.invalid[:, place], first)
            yield from self._cut(first, made)

    def _cut(self, first: int, tuples: NDArray[np.uint32]) -> Iterator[ScoreBlock]:
        """Yield blocks of tuples of one segment, which never crosses a window."""
        window = first // WINDOW_TOKENS * WINDOW_TOKENS
        for start in range(0, tuples.shape[1], self.spec.block_tokens):
            for row, own in enumerate(tuples[:, start : start + self.spec.block_tokens]):
                yield ScoreBlock(row, window, own)
