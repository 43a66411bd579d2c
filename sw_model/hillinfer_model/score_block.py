# SPDX-License-Identifier: Apache-2.0
"""A score block: tuples that a device streams to the host while it goes on scoring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ScoreBlock:
    """Tuples of token position and score (HillInfer section 4.2; contract, section 11).

    Parameters
    ----------
    kv_head
        The KV head whose selected set these scores belong to; 0 in scope `layer`.
    window
        Position of the first token of the 65,536-token window the tuples lie in.
    tuples
        uint32 of shape (tokens,): score code << 16 | low 16 bits of the position, in position
        order.
    """

    kv_head: int
    window: int
    tuples: NDArray[np.uint32]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Token positions, int64 of shape (tokens,)."""
        return (self.tuples & np.uint32(0xFFFF)).astype(np.int64) + self.window

    @property
    def codes(self) -> NDArray[np.uint16]:
        """Score codes, uint16 of shape (tokens,); 0 marks an invalid token."""
        return (self.tuples >> np.uint32(16)).astype(np.uint16)
