# SPDX-License-Identifier: Apache-2.0
"""The execution `golden`: the numpy golden model behind the scorer seam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer.hie.top_alpha import top_of_blocks
from hillinfer.hie.wanted import Wanted
from hillinfer.native.variant import Variant
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.choices import Scope
from hillinfer_model.coded_segment import CodedSegment
from hillinfer_model.golden import GoldenModel
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.layout import read_codes, write_codes
from hillinfer_model.score_block import ScoreBlock


class GoldenScorer:
    """A `Scorer` for tests and for people without hardware: right first, not fast.

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
        self._model = GoldenModel(spec, scope)

    def statistics(
        self, keys: torch.Tensor, first_position: int, preceding: ChannelStatistics | None
    ) -> ChannelStatistics:
        """Take a segment's channel statistics (contract, section 2); see `Scorer`."""
        return self._model.statistics(_fp16_codes(keys), first_position, preceding)

    def encode(
        self,
        keys: torch.Tensor,
        statistics: ChannelStatistics,
        shadow: NDArray[np.uint8],
        first_token: int,
    ) -> None:
        """Write codes and exponents into a segment's shadow (contract, section 5); see `Scorer`."""
        write_codes(
            shadow, first_token, self._model.encode(_fp16_codes(keys), statistics), self.spec
        )

    @property
    def is_fast(self) -> bool:
        """Say that it is not."""
        return False

    @property
    def table_variant(self) -> Variant | None:
        """None: the library does not choose over its tables as this does."""
        return None

    def choose(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        wanted: Wanted,
    ) -> list[NDArray[np.int64]]:
        """Select from score blocks, merged as they come; see `Scorer`."""
        blocks = self.score(query, scaling, segments, coming)
        return top_of_blocks(blocks, self.spec, self.scope, segments, coming, wanted)

    def score(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
    ) -> Iterator[ScoreBlock]:
        """Score every token of consecutive segments (contract, sections 3 to 6); see `Scorer`."""
        if query.dtype != torch.float32:
            raise TypeError(f"a query is float32, not {query.dtype}; use query.float()")
        coded = [
            CodedSegment(
                segment.base_position,
                read_codes(segment.shadow, 0, segment.tokens, self.spec),
                segment.statistics,
            )
            for segment in segments
        ]
        return self._model.score_blocks(query.detach().numpy(), scaling, coded, coming)


def _fp16_codes(keys: torch.Tensor) -> NDArray[np.uint16]:
    """Return the codes of a float16 tensor on the CPU, without a copy where it is possible."""
    if keys.dtype != torch.float16:
        raise TypeError(f"keys are float16, not {keys.dtype}; use keys.to(torch.float16)")
    return np.asarray(keys.detach().numpy().view(np.uint16))
