# SPDX-License-Identifier: Apache-2.0
"""Keeps every sequence's key shadow up to date with its rows."""

from __future__ import annotations

import numpy as np
import torch

from hillinfer.devices.scorer import Scorer, SegmentShadow
from hillinfer.pools.accountant import Accountant, Part
from hillinfer.pools.budget_plan import segment_statistics_bytes
from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.row_reader import RowReader
from hillinfer.storage.segment import Segment
from hillinfer.storage.sequence import Sequence
from hillinfer_model.kernel_spec import KernelSpec


class ShadowKeeper:
    """Codes keys segment by segment, each segment's statistics taken once (contract, section 2).

    Parameters
    ----------
    scorer
        Takes statistics and codes keys.
    layers
        Layers of the model.
    reader, layout
        Bring back the keys of rows that were stored before.
    accountant
        Counts shadows and statistics.
    """

    def __init__(
        self,
        scorer: Scorer,
        layers: int,
        reader: RowReader,
        layout: RowLayout,
        accountant: Accountant,
    ) -> None:
        self._scorer = scorer
        self._spec: KernelSpec = scorer.spec
        self._layers = layers
        self._reader = reader
        self._layout = layout
        self._accountant = accountant
        self._shadow_bytes = layers * self._spec.segment_bytes
        self._statistics_bytes = layers * segment_statistics_bytes(self._spec)

    def code_full_segments(self, layer: int, sequence: Sequence, fresh: torch.Tensor) -> None:
        """Code every segment that is full and not yet coded.

        Parameters
        ----------
        layer, sequence
            Whose shadow.
        fresh
            Keys of the newest tokens, float16 (tokens, kv_heads, head_dim) on the CPU; saves
            reading them back.
        """
        full = sequence.lengths[layer] // self._spec.segment_tokens
        self._code(layer, sequence, fresh, full * self._spec.segment_tokens)

    def code_all(self, layer: int, sequence: Sequence, fresh: torch.Tensor) -> list[SegmentShadow]:
        """Code every token, because scoring follows, and return the shadow of all segments."""
        self._code(layer, sequence, fresh, sequence.lengths[layer])
        shadows = []
        for number, segment in enumerate(sequence.segments):
            statistics = segment.statistics[layer]
            if statistics is None:
                break
            shadows.append(
                SegmentShadow(
                    base_position=number * self._spec.segment_tokens,
                    tokens=segment.coded_tokens[layer],
                    shadow=segment.shadows[layer],
                    statistics=statistics,
                )
            )
        return shadows

    def share(self, sequence: Sequence) -> list[Segment]:
        """Return the sequence's segments, owned once more each, for a fork of it."""
        for segment in sequence.segments:
            segment.owners += 1
        return list(sequence.segments)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop codes from position `length` on; a cut segment keeps its statistics."""
        size = self._spec.segment_tokens
        kept = -(-length // size)
        if length % size and kept <= len(sequence.segments):
            left = length - (kept - 1) * size
            if any(coded > left for coded in sequence.segments[kept - 1].coded_tokens):
                segment = self._own(sequence, kept - 1)
                segment.coded_tokens = [min(coded, left) for coded in segment.coded_tokens]
        while len(sequence.segments) > kept:
            self._release(sequence.segments.pop())

    def _code(self, layer: int, sequence: Sequence, fresh: torch.Tensor, stop: int) -> None:
        size = self._spec.segment_tokens
        for number in range(-(-stop // size)):
            base, end = number * size, min((number + 1) * size, stop)
            if number < len(sequence.segments) and (
                sequence.segments[number].coded_tokens[layer] >= end - base
            ):
                continue
            segment = self._own(sequence, number)
            coded = segment.coded_tokens[layer]
            statistics = segment.statistics[layer]
            if statistics is None:
                keys = self._keys(layer, sequence, fresh, base, end)
                preceding = sequence.segments[number - 1].statistics[layer] if number else None
                statistics = self._scorer.statistics(keys, base, preceding)
                segment.statistics[layer] = statistics
            else:
                keys = self._keys(layer, sequence, fresh, base + coded, end)
            self._scorer.encode(keys, statistics, segment.shadows[layer], coded)
            segment.coded_tokens[layer] = end - base

    def _keys(
        self, layer: int, sequence: Sequence, fresh: torch.Tensor, start: int, end: int
    ) -> torch.Tensor:
        """Return the keys of start <= position < end as FP16, from `fresh` where it has them."""
        fresh_start = sequence.lengths[layer] - len(fresh)
        if start >= fresh_start:
            return fresh[start - fresh_start : end - fresh_start]
        keys = torch.empty((end - start, *fresh.shape[1:]), dtype=torch.float16)
        at = 0
        stored = np.arange(start, min(end, fresh_start))
        for rows in self._reader.stream(layer, sequence, stored):
            keys[at : at + len(rows)] = self._layout.keys(torch.from_numpy(rows))
            at += len(rows)
        keys[at:] = fresh[: end - start - at]
        return keys

    def _own(self, sequence: Sequence, number: int) -> Segment:
        """Return a segment that nobody else sees, made or copied as needed."""
        if number == len(sequence.segments):
            self._take()
            sequence.segments.append(Segment(self._spec, self._layers))
        segment = sequence.segments[number]
        if segment.owners > 1:
            self._take()
            segment.owners -= 1
            segment = sequence.segments[number] = segment.clone()
        return segment

    def _take(self) -> None:
        self._accountant.take(Part.SHADOW, self._shadow_bytes)
        try:
            self._accountant.take(Part.OTHER, self._statistics_bytes)
        except BaseException:
            self._accountant.give(Part.SHADOW, self._shadow_bytes)
            raise

    def _release(self, segment: Segment) -> None:
        segment.owners -= 1
        if segment.owners == 0:
            self._accountant.give(Part.SHADOW, self._shadow_bytes)
            self._accountant.give(Part.OTHER, self._statistics_bytes)
