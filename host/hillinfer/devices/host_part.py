# SPDX-License-Identifier: Apache-2.0
"""What the host does of a sequence whose segments lie partly on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.devices.scorer import SegmentShadow
from hillinfer_model.beats import Beats


class StartedScoring(Protocol):
    """One query against one sequence, with its offsets known (contract, section 3)."""

    def query_blocks(self, numbers: Sequence[int]) -> Beats:
        """Return the query blocks of the segments of some numbers, one behind the other."""
        ...

    def tuples(self, wanted: Sequence[tuple[int, range]]) -> Iterator[NDArray[np.uint32]]:
        """Score tokens on the host.

        Parameters
        ----------
        wanted
            Numbers of segments, and which tokens of each.

        Returns
        -------
        Of each in turn, uint32 of shape (sets, tokens) (contract, section 6).
        """
        ...

    def fill(self, wanted: Sequence[tuple[int, range]], tuples: NDArray[np.uint32]) -> None:
        """Score tokens as `tuples` does, into their places among those of the whole sequence.

        Parameters
        ----------
        wanted
            As there, each from the start of a group on or after what others have left there.
        tuples
            uint32 of shape (sets, N), contiguous.
        """
        ...

    def end(self) -> None:
        """Give memory back."""
        ...


class HostPart(Protocol):
    """One way to do the host's part."""

    def start(
        self, scaled: torch.Tensor, segments: Sequence[SegmentShadow], coming: int = 0
    ) -> StartedScoring:
        """Look at R ∪ Φ, so that the device can be launched (contract, section 3).

        Parameters
        ----------
        scaled
            Queries from `scale_query`.
        segments
            All segments of the sequence.
        coming
            As for `Scorer.score`.
        """
        ...
