# SPDX-License-Identifier: Apache-2.0
"""Which stored chunk goes first where room is short."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkFacts:
    """What a policy may look at, of one chunk."""

    position: int
    hits: float
    turn: int
    cost: float
    last: float
    now: float


class EvictionPolicy:
    """Ranks chunks; the one of least worth among leaves that nobody leases or pins goes first."""

    def worth(self, facts: ChunkFacts, age: float) -> float:
        """Return what a chunk is worth; this is LRU."""
        return facts.now
