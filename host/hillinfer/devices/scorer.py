# SPDX-License-Identifier: Apache-2.0
"""The interface of whatever executes the scoring contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.hie.probe_shadow import ProbeShadow
from hillinfer.hie.wanted import Wanted
from hillinfer.native.variant import Variant
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.score_block import ScoreBlock


@dataclass(frozen=True)
class SegmentShadow:
    """The key shadow of one segment of one layer and sequence.

    Parameters
    ----------
    base_position
        Logical position of the segment's first token, a multiple of the segment length.
    tokens
        Tokens coded so far; the segments of one call are consecutive, start at position 0, and
        only the last one may be short.
    shadow
        uint8 of shape (segment_beats, 64), in the layout of contract section 5. Groups lie at
        fixed places, so a short segment is the prefix of a full one, its last group included.
    statistics
        The segment's channel statistics.
    probe_copy
        A copy of the probe tokens among `tokens`, kept beside a full shadow in DRAM, or None. A
        scorer that looks at them first then need not pass over the shadow twice.
    """

    base_position: int
    tokens: int
    shadow: NDArray[np.uint8]
    statistics: ChannelStatistics
    probe_copy: ProbeShadow | None = None

    @property
    def on_drive(self) -> bool:
        """Whether `shadow` is read when it is asked for, and valid until the next one is."""
        return False

    @property
    def device_tokens(self) -> int:
        """How many of the first tokens a device can score without the host's shadow."""
        return 0

    @property
    def probes(self) -> ProbeShadow:
        """The host's copy of the probe tokens among `device_tokens`."""
        raise ValueError("the host holds this shadow whole")


def total_tokens(segments: Sequence[SegmentShadow]) -> int:
    """Return how many tokens the consecutive segments of a sequence hold."""
    return segments[-1].base_position + segments[-1].tokens if segments else 0


class Scorer(Protocol):
    """Makes key shadows and selects by them; one implementation per execution of the contract."""

    spec: KernelSpec
    scope: Scope

    @property
    def is_fast(self) -> bool:
        """Whether the processor scores by itself, in C++ and with vectors."""
        ...

    @property
    def table_variant(self) -> Variant | None:
        """The variant of the native library that chooses over its tables as this scorer does.

        None where this scorer is to be asked.
        """
        ...

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
        """
        ...

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
            uint8 of shape (segment_beats, 64).
        first_token
            Index of the first of `keys` within the segment.
        """
        ...

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Wanted,
    ) -> list[NDArray[np.int64]]:
        """Select tokens for a query: the kept ones and the best others (contract, section 4).

        Parameters
        ----------
        query, scaling, segments, coming
            As for `score`, whose errors it raises; at least one token.
        wanted
            Of N, the coming token included, which is one of the newest.

        Returns
        -------
        One ascending int64 array of positions per selected set: one for the layer, or one per KV
        head. The coming token is the last of each.

        Raises
        ------
        ValueError
            More is wanted than there is, or less than is kept.
        """
        ...

    def score(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments, which `choose` ranks, and yield score blocks.

        Parameters
        ----------
        query
            float32 of shape (query_heads, head_dim) on the CPU, after rotary embedding.
        scaling
            What the attention function multiplies inner products with.
        segments
            All segments of the sequence; their tokens together are N, this step's own included.
            Shadows on the drive are to be asked for in this order and copied from at once.
        coming
            Tokens that N counts and that have no key yet (contract, section 3): 1 where the query
            is a predicted one.

        Raises
        ------
        hillinfer_model.errors.NonFiniteQueryError
            Before anything is scored, where the query holds an infinity or a NaN.
        """
        ...
