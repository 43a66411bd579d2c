# SPDX-License-Identifier: Apache-2.0
"""What HillInfer aims at beside each peer, and whether it got there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from peers.crossover import Crossover, CrossoverKind

_MEASURED = (CrossoverKind.BELOW, CrossoverKind.MEASURED)


class Goal(ABC):
    """An aim in words and as a test."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The aim in words."""

    @abstractmethod
    def met(self, speedups: Mapping[int, float], crossover: Crossover) -> bool | None:
        """Say whether it was reached; None where what was measured cannot tell.

        Parameters
        ----------
        speedups
            The peer's step over HillInfer's, by context in tokens.
        crossover
            From which context on HillInfer's step is the shorter one.
        """


@dataclass(frozen=True)
class AheadFrom(Goal):
    """Faster at every measured context from `context` tokens on."""

    context: int

    @property
    def text(self) -> str:
        """The aim in words."""
        return f"ahead at every context from {self.context}"

    def met(self, speedups: Mapping[int, float], crossover: Crossover) -> bool | None:
        """Look at what was measured alone."""
        ratios = [ratio for context, ratio in speedups.items() if context >= self.context]
        return all(ratio > 1 for ratio in ratios) if ratios else None


@dataclass(frozen=True)
class CrossoverBy(Goal):
    """Faster from a context on that is at most `context` tokens."""

    context: int

    @property
    def text(self) -> str:
        """The aim in words."""
        return f"a crossover at {self.context} or below"

    def met(self, speedups: Mapping[int, float], crossover: Crossover) -> bool | None:
        """Say no where the line leads beyond, and nothing where it leads there unmeasured."""
        if crossover.context is None or crossover.context > self.context:
            return False
        return True if crossover.kind in _MEASURED else None


def goal_of(peer: str) -> Goal:
    """Return the aim beside a peer: transformers runs the same loop, the others their own."""
    return AheadFrom(4096) if peer.startswith("transformers") else CrossoverBy(16384)
