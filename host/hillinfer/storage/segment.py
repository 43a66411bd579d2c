# SPDX-License-Identifier: Apache-2.0
"""The shadow of one segment in all layers, shared by the sequences that have it in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec


class Segment:
    """Codes and statistics of 1,024 positions in every layer (contract, section 1).

    Parameters
    ----------
    spec
        Fixes the layout.
    layers
        Layers of the model.
    """

    def __init__(self, spec: KernelSpec, layers: int) -> None:
        self.shadows: list[NDArray[np.uint8]] = [
            np.zeros((spec.segment_beats, BEAT_BYTES), np.uint8) for _ in range(layers)
        ]
        self.statistics: list[ChannelStatistics | None] = [None] * layers
        self.coded_tokens = [0] * layers
        self.owners = 1

    def clone(self) -> Segment:
        """Return a copy that one sequence owns alone."""
        copy = object.__new__(Segment)
        copy.shadows = [shadow.copy() for shadow in self.shadows]
        copy.statistics = list(self.statistics)
        copy.coded_tokens = list(self.coded_tokens)
        copy.owners = 1
        return copy
